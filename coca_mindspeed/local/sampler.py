"""Sampling from a policy: groups of responses to a batch of prompts, and single responses token by token.

Responses of a group share a decoder row while they are identical.  With the confidence first, a third of a short
response (the tag, a zero, the point, often a digit) is shared.  On CUDA, launching kernels takes longer than running
them, so every response has a row from the start, and a decoding step is one CUDA graph.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from coca_mindspeed.local.inverse_cdf import check_drawn, draw, draw_at, numbers_per_draw
from coca_mindspeed.local.policy import Policy
from coca_mindspeed.local.prefill import prefilled
from coca_mindspeed.local.static_decoder import CaptureError, StaticDecoder, decodes_statically
from coca_mindspeed.scoring.rollout import Sampled
from coca_mindspeed.utils.console import print_note

_SHRINK_AT = 0.9  # share of rows in use below which the others are removed, which copies the cache
_MORE_THAN_A_VOCABULARY = 2**32
#: Token ids, lengths, log-probs, whether they have ended, and mean entropy of responses.
_Parts = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


@dataclass(frozen=True, kw_only=True)
class Rollout(Sampled):
    """Responses that a policy sampled, on the CPU, group by group; padded to the longest, of T tokens.

    Attributes:
        prompts: token ids of each response's prompt.
        log_probs: float32 ``[B, T]`` of the sampled tokens under the policy.
        finished: bool ``[B]``; False if the length limit cut the response off.
        entropy: float32 ``[B]``, nats, mean over the response's tokens.
    """

    prompts: Sequence[Sequence[int]]
    log_probs: Tensor
    finished: Tensor
    entropy: Tensor


class _Settings(NamedTuple):
    group_size: int
    max_new_tokens: int
    temperature: float
    generator: torch.Generator
    progress: Callable[[int], None]  # gets the tokens of a response that are done


class NextStep(NamedTuple):
    """Changes to the decoder's rows, and their next tokens; at most one of ``keep`` and ``repeat`` is set."""

    keep: Tensor | None  # int64, rows to keep, repeats allowed; None: all
    repeat: Tensor | None  # int64, rows to append a copy of; None: none
    token: Tensor  # int64 `[rows, 1]`, the next token of each row


class SharedRows:
    """The decoder row of each unfinished response, ``row_of`` int64 ``[responses]``."""

    def __init__(self, prompts: int, group_size: int, device: torch.device) -> None:
        self.row_of = torch.arange(prompts, device=device).repeat_interleave(group_size)
        self._rows = prompts

    def append(self, going: Tensor, token: Tensor) -> NextStep:
        """Append one ``token`` ``[responses, 1]`` each to the unfinished responses (``going``, bool ``[responses]``).

        The other responses are dropped.
        """
        pairs = self.row_of[going] * _MORE_THAN_A_VOCABULARY + token[going, 0]
        pairs, pair_of = torch.unique(pairs, return_inverse=True)
        row, token = pairs // _MORE_THAN_A_VOCABULARY, pairs % _MORE_THAN_A_VOCABULARY
        # The first continuation of a row keeps it, the others need a copy.
        another = torch.zeros_like(row, dtype=torch.bool)
        another[1:] = row[1:] == row[:-1]
        repeat = row[another]
        rows = self._rows + len(repeat)
        if len(row) <= _SHRINK_AT * rows:
            self.row_of, self._rows = pair_of, len(row)
            return NextStep(row, None, token[:, None])
        row[another] = torch.arange(self._rows, rows, device=row.device)
        self.row_of, self._rows = row[pair_of], rows
        tokens = token.new_zeros(rows, 1)  # rows whose responses have ended get any token
        tokens[row, 0] = token
        return NextStep(None, repeat if len(repeat) else None, tokens)


def sample_responses(
    policy: Policy,
    prompts: Sequence[Sequence[int]],
    *,
    group_size: int,
    max_new_tokens: int,
    temperature: float,
    generator: torch.Generator,
    batch_responses: int | None = None,
    progress: Callable[[int], None] = lambda tokens: None,
) -> Rollout:
    """Sample ``group_size`` responses to each prompt.

    Sampling stops at any end-of-sequence token or after ``max_new_tokens``; PAD is never sampled.  ``generator`` is the
    only source of randomness.  At most ``batch_responses`` responses are in memory at once, rounded down to whole
    groups (at least one); None: all.  ``progress`` is called with the tokens of a response that are done, up to
    ``max_new_tokens`` for each batch.
    """
    at_once = len(prompts) if batch_responses is None else max(1, batch_responses // group_size)
    batches = [prompts[i : i + at_once] for i in range(0, len(prompts), at_once)]
    parts = []
    for number, batch in enumerate(batches):
        done = number * max_new_tokens
        settings = _Settings(group_size, max_new_tokens, temperature, generator, partial(_add, progress, done))
        with torch.inference_mode(), policy.autocast():
            parts.append(_sample_batch(policy, batch, settings))
        progress(done + max_new_tokens)
    if policy.static is not None and not policy.static.decoder.small:
        policy.static = None
    token_ids, lengths, log_probs, finished, entropy = map(torch.cat, zip(*parts, strict=True))
    width = int(lengths.max())
    # Inference tensors cannot enter a graph; clones can.
    return Rollout(
        lengths=lengths.clone().cpu(),
        prompts=[prompt for prompt in prompts for _ in range(group_size)],
        token_ids=token_ids[:, :width].clone().cpu(),
        log_probs=log_probs[:, :width].clone().cpu(),
        finished=finished.clone().cpu(),
        entropy=entropy.clone().cpu(),
    )


def _add(progress: Callable[[int], None], done: int, tokens: int) -> None:
    progress(done + tokens)


def _sample_batch(policy: Policy, prompts: Sequence[Sequence[int]], settings: _Settings) -> _Parts:
    group_size, max_new_tokens, temperature, generator, progress = settings
    if decodes_statically(policy):
        before = generator.get_state()
        try:
            return _sample_statically(policy, prompts, settings)
        except CaptureError as error:
            policy.decoding, policy.static = "shared", None
            generator.set_state(before)
            print_note(f"note: responses are decoded without CUDA graphs, which failed: {error}")
    device, rows = policy.device, len(prompts) * group_size
    token_ids = torch.full((rows, max_new_tokens), policy.pad_id, device=device)
    log_probs = torch.zeros(rows, max_new_tokens, device=device)
    lengths = torch.full((rows,), max_new_tokens, device=device)
    finished = torch.zeros(rows, dtype=torch.bool, device=device)
    entropy = torch.zeros(rows, device=device)
    eos_ids = torch.tensor(policy.eos_ids, device=device)

    decoder = Decoder(policy, prompts, max_new_tokens)
    shared = SharedRows(len(prompts), group_size, device)
    row = torch.arange(rows, device=device)  # result row of each unfinished response
    for t in range(max_new_tokens):
        token, scores = draw(policy, decoder.logits, temperature, generator, shared.row_of)
        token_ids[row, t] = token[:, 0]
        log_probs[row, t] = scores.log_probs[:, 0]
        entropy[row] += scores.entropy

        going = ~torch.isin(token[:, 0], eos_ids)
        ended = row[~going]
        lengths[ended] = t + 1
        finished[ended] = True
        row = row[going]
        if len(row) == 0 or t + 1 == max_new_tokens:
            break
        following = shared.append(going, token)
        if following.keep is not None:
            decoder.keep(following.keep)
        if following.repeat is not None:
            decoder.repeat(following.repeat, len(row))
        decoder.step(following.token)
        progress(t + 1)
    return token_ids, lengths, log_probs, finished, entropy / lengths


_LOOK = 16  # tokens; so often the host asks whether all responses have ended


class StaticSampler:
    """Responses that are drawn and stopped on the device, one row each, in buffers that stay in place.

    A token takes a random number for every response, also for those that have ended.
    """

    def __init__(self, policy: Policy, decoder: StaticDecoder) -> None:
        self.decoder = decoder
        self._policy, rows, columns, device = policy, decoder.rows, decoder.columns, policy.device
        self._uniform = torch.zeros(columns, rows, numbers_per_draw(policy.vocabulary), device=device)
        self._token_ids = torch.zeros(rows, columns, dtype=torch.int64, device=device)
        self._log_probs = torch.zeros(rows, columns, device=device)
        self._entropy = torch.zeros(rows, device=device)
        self._lengths = torch.zeros(rows, dtype=torch.int64, device=device)
        self._going, self._invalid = (torch.zeros(rows, dtype=torch.bool, device=device) for _ in range(2))
        self._eos_ids = torch.tensor(policy.eos_ids, device=device)

    def start(self, used: int) -> None:
        """Begin ``used`` responses."""
        for buffer in (self._log_probs, self._entropy, self._lengths, self._invalid, self._going):
            buffer.zero_()
        self._token_ids.fill_(self._policy.pad_id)
        self._going[:used] = True

    def fill_uniform(self, columns: slice, used: int, generator: torch.Generator) -> None:
        """Draw the numbers of ``used`` responses for the tokens in ``columns``."""
        numbers = self._uniform[columns, :used]
        numbers.copy_(torch.rand(*numbers.shape, generator=generator, device=numbers.device))

    def draw(self, logits: Tensor, temperature: float, rows: int, row_of: Tensor | None = None) -> None:
        """Draw the token in the decoder's column for the first ``rows`` responses, as its next input."""
        column = self.decoder.column
        uniform = self._uniform.index_select(0, column)[0, :rows]
        token, scores, valid = draw_at(self._policy, logits, temperature, uniform, row_of)
        going = self._going[:rows]
        ended = ~going
        self._invalid[:rows] |= going & ~valid[:, 0]
        token = token.masked_fill(ended[:, None], self._policy.pad_id)
        self.decoder.token[:rows] = token
        self._token_ids[:rows].index_copy_(1, column, token)
        self._log_probs[:rows].index_copy_(1, column, scores.log_probs.masked_fill(ended[:, None], 0.0))
        self._entropy[:rows] += scores.entropy.masked_fill(ended, 0.0)
        self._lengths[:rows] += going
        going &= (token != self._eos_ids).all(dim=1)

    def step(self, temperature: float, used: int, width: int) -> None:
        """Decode a token, which is the last of ``width`` columns, and draw the next, for ``used`` responses."""

        def decode_and_draw(rows: int, columns: int) -> None:
            self.draw(self.decoder.forward(rows, columns), temperature, rows)

        self.decoder.run(decode_and_draw, used, width, temperature)

    def unfinished(self) -> bool:
        """Wait for the device: whether any response goes on.  NoDistributionError if a draw was invalid."""
        going, invalid = torch.stack([self._going.any(), self._invalid.any()]).tolist()
        if invalid:
            check_drawn(~self._invalid)
        return bool(going)

    def responses(self, used: int, columns: slice) -> _Parts:
        lengths = self._lengths[:used].clone()
        token_ids, log_probs = self._token_ids[:used, columns].clone(), self._log_probs[:used, columns].clone()
        return token_ids, lengths, log_probs, ~self._going[:used], self._entropy[:used] / lengths


def _sample_statically(policy: Policy, prompts: Sequence[Sequence[int]], settings: _Settings) -> _Parts:
    group_size, max_new_tokens, temperature, generator, progress = settings
    used = len(prompts) * group_size
    cache, started = prefilled(policy, prompts, 0)
    end = started.width + max_new_tokens
    if policy.static is None or not policy.static.decoder.fits(used, end):
        policy.static = None  # freed before its successor is allocated
        policy.static = StaticSampler(policy, StaticDecoder(policy, cache, used, end))
    sampler: StaticSampler = policy.static
    sampler.decoder.start(cache, started, group_size)
    sampler.start(used)
    logits = policy.lm_head.logits(started.output[:, -1])
    for column in range(started.width, end):
        if (column - started.width) % _LOOK == 0:
            if column > started.width and not sampler.unfinished():
                break
            progress(column - started.width)
            sampler.fill_uniform(slice(column, min(column + _LOOK, end)), used, generator)
        if column == started.width:
            row_of = torch.arange(len(prompts), device=policy.device).repeat_interleave(group_size)
            sampler.draw(logits, temperature, used, row_of)
        else:
            sampler.step(temperature, used, column)
    sampler.unfinished()
    return sampler.responses(used, slice(started.width, end))


class Decoder:
    """One batch's KV cache and the logits of its next token."""

    def __init__(self, policy: Policy, prompts: Sequence[Sequence[int]], max_new_tokens: int | None = None) -> None:
        """Prefill each prompt as a row; ``max_new_tokens`` bounds the cache's capacity (None: unknown)."""
        self._layer, self._rows = policy.lm_head, len(prompts)
        self.cache, started = prefilled(policy, prompts, max_new_tokens)
        self.width, self._mask = started.width, started.mask
        # Without a mask all rows have the same length and position.
        self._position = started.lengths[:, None] if self._mask is not None else started.lengths[:1, None]
        self.logits = self._layer.logits(started.output[:, -1])

    def step(self, token: Tensor) -> None:
        """Append one token ``[rows, 1]`` to every row."""
        self.width += 1
        if self._mask is not None and self._mask.shape[1] < self.width:
            self._mask = torch.nn.functional.pad(self._mask, (0, self.width), value=True)
        states = self._layer.hidden_states(
            input_ids=token,
            attention_mask=None if self._mask is None else self._mask[:, : self.width],
            position_ids=self._position,
            cache=self.cache,
            use_cache=True,
        )
        self._position = self._position + 1
        self.logits = self._layer.logits(states[:, -1])

    def keep(self, rows: Tensor) -> None:
        """Keep these rows, repeats allowed; :attr:`logits` are those of the earlier rows until the next step."""
        self.cache.batch_select_indices(rows)
        self._rows = len(rows)
        if self._mask is not None:
            self._position, self._mask = self._position[rows], self._mask[rows]

    def repeat(self, rows: Tensor, most: int) -> None:
        """Append copies of these rows, for at most ``most`` rows from now on; see :meth:`keep` for the logits."""
        self.cache.repeat_rows(rows, self._rows, most)
        self._rows += len(rows)
        if self._mask is not None:
            self._position = torch.cat([self._position, self._position[rows]])
            self._mask = torch.cat([self._mask, self._mask[rows]])


def token_stream(
    policy: Policy, prompt: Sequence[int], *, temperature: float, generator: torch.Generator
) -> Iterator[int]:
    """Token ids of one response up to an end token, each computed when requested; temperature 0 is greedy."""
    decoder, last = None, None
    while True:
        # Inference mode is per thread, so it is entered for each token.
        with torch.inference_mode(), policy.autocast():
            if decoder is None:
                decoder = Decoder(policy, [prompt])
            elif last is not None:
                decoder.step(last)
            if temperature == 0:
                last = policy.sampling_logits(decoder.logits, 1.0).log_softmax(dim=-1).argmax(dim=-1, keepdim=True)
            else:
                last, _ = draw(policy, decoder.logits, temperature, generator)
        yield int(last)
        if int(last) in policy.eos_ids:
            return
