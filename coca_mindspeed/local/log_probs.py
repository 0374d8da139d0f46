"""Log-probs of given responses under the policy, with gradient: the forward pass of the update."""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache

from coca_mindspeed.algorithm.objective import Objective
from coca_mindspeed.local.lm_head import TokenScores, scores_of_logits
from coca_mindspeed.local.policy import Policy
from coca_mindspeed.local.prefill import pad_left, positions_of, run_prompts, shared_start
from coca_mindspeed.local.prefix_sharing import (
    GoOn,
    Indices,
    ResponsePasses,
    Scored,
    go_on,
    go_on_separately,
    take_rows,
)


def response_log_probs(
    policy: Policy,
    prompts: Sequence[Sequence[int]],
    token_ids: Tensor,
    *,
    temperature: float,
    share_prompts: bool = True,
) -> Tensor:
    return response_scores(policy, prompts, token_ids, temperature=temperature, share_prompts=share_prompts).log_probs


def response_scores(
    policy: Policy,
    prompts: Sequence[Sequence[int]],
    token_ids: Tensor,
    *,
    temperature: float,
    share_prompts: bool = True,
    group_sizes: Sequence[int] | None = None,
) -> TokenScores:
    """Log-prob and entropy of every response token; :mod:`coca_mindspeed.local.lm_head` bounds the logits in memory.

    Args:
        policy: the policy.
        prompts: P prompts.
        token_ids: int64 ``[R, tokens]``, group by group; results behind a response's end are meaningless.
        temperature: as in sampling.
        share_prompts: run each prompt once; its responses attend to its keys and values, gradient included.
        group_sizes: rows of each prompt, if groups differ in size.

    Returns:
        float32 ``[R, tokens]`` each.
    """
    return ResponseBatch(policy, prompts, token_ids, temperature, share_prompts, group_sizes).scores()


@dataclass(frozen=True)
class ResponseBatch:
    """Responses to score; the attributes are the arguments of :func:`response_scores`.

    Attributes:
        passes: how the tokens are split into forward passes; None: one pass.  Tokens in no pass have the log-prob 0.
    """

    policy: Policy
    prompts: Sequence[Sequence[int]]
    token_ids: Tensor
    temperature: float
    share_prompts: bool = True
    group_sizes: Sequence[int] | None = None
    passes: ResponsePasses | None = None

    def scores(self) -> TokenScores:
        if self._fits_one_chunk:
            return self._scores_at_once()
        with self.policy.autocast():
            states, places = self._joined_states()
            found = self.policy.output_layer.scores(states, self._tokens(places), self._as_policy)
        return TokenScores(*(self._in_place(each, places) for each in found))

    def backward(self, objective_of: Callable[[Tensor], Objective]) -> tuple[Objective, TokenScores]:
        """Accumulate the gradient of an objective of the log-probs; logits are computed once.

        Args:
            objective_of: from log-probs ``[R, tokens]``; its loss is a sum of terms of one token's log-prob each.

        Returns:
            The objective and the scores, detached.
        """
        if self._fits_one_chunk:
            log_probs, entropy = self._scores_at_once()
            objective = objective_of(log_probs)
            objective.loss.backward()
            return objective._replace(loss=objective.loss.detach()), TokenScores(log_probs.detach(), entropy)
        with self.policy.autocast():
            states, places = self._joined_states()
            _, found = self.policy.output_layer.backward(
                states,
                self._tokens(places),
                self._as_policy,
                lambda log_probs: objective_of(self._in_place(log_probs, places)).loss,
            )
        scores = TokenScores(*(self._in_place(each, places) for each in found))
        return objective_of(scores.log_probs), scores

    @cached_property
    def _sizes(self) -> Sequence[int]:
        """Responses of each prompt."""
        prompts, rows, sizes = len(self.prompts), len(self.token_ids), self.group_sizes
        if sizes is None:
            if rows % prompts:
                raise ValueError(f"token_ids has {rows} rows, expected a multiple of the {prompts} prompts")
            sizes = [rows // prompts] * prompts
        if len(sizes) != prompts or sum(sizes) != rows:
            raise ValueError(f"group_sizes {list(sizes)} should name {prompts} prompts and {rows} rows in all")
        return sizes

    @property
    def _fits_one_chunk(self) -> bool:
        return self.policy.output_layer.fits_one_chunk(self.token_ids.numel())

    def _as_policy(self, logits: Tensor) -> Tensor:
        return self.policy.logits_of_policy(logits, self.temperature)

    def _tokens(self, places: Tensor) -> Tensor:
        return self.token_ids.flatten()[places]

    def _in_place(self, found: Tensor, places: Tensor) -> Tensor:
        """``[P * G, tokens]`` of what was found for the tokens at ``places``; 0 elsewhere."""
        return found.new_zeros(self.token_ids.numel()).index_copy(0, places, found).view(self.token_ids.shape)

    def _places(self, scored: Sequence[Scored]) -> Tensor:
        places = np.concatenate([each.places for each in scored])
        return torch.tensor(places, device=self.token_ids.device)

    def _joined_states(self) -> tuple[Tensor, Tensor]:
        """Hidden states that predict tokens of the responses, ``[n, hidden]``, and the places ``[n]`` of these."""
        states, scored = zip(*self._states(go_on_separately), strict=True)
        predicting = [take_rows(part.flatten(0, 1), of.states) for part, of in zip(states, scored, strict=True)]
        return torch.cat(predicting), self._places(scored)

    def _scores_at_once(self) -> TokenScores:
        """Log-prob and entropy of every token, from all logits."""
        logits, scored = [], []
        with self.policy.autocast():
            for states, of in self._states(go_on):
                # Each part's logits come before the next part's pass: autograd adds up gradients in the order of the
                # forward.
                logits.append(take_rows(self.policy.output_layer.logits(states).flatten(0, 1), of.states))
                scored.append(of)
        places = self._places(scored)
        found = scores_of_logits(self._as_policy(torch.cat(logits)), self._tokens(places))
        return TokenScores(*(self._in_place(each, places) for each in found))

    def _states(self, go_on: GoOn) -> Iterator[tuple[Tensor, Scored]]:
        """Hidden states of each pass, ``[rows, tokens, hidden]``, and what they predict."""
        cache = DynamicCache(config=self.policy.model.config)
        prompt_of = np.repeat(np.arange(len(self.prompts)), self._sizes)
        width = self.token_ids.shape[1]
        # With nothing to share a pass for the prompts would be one more and save none.
        sharing = self.policy.sharing if self.share_prompts else "none"
        if sharing != "none" and (max(self._sizes) > 1 or shared_start(self.prompts, sharing)):
            passes = self.passes or ResponsePasses.whole(prompt_of, width)
            return _shared(self.policy, self.prompts, self.token_ids, passes, cache, go_on)
        return _plain(self.policy, self.prompts, self.token_ids, prompt_of)


def _shared(
    policy: Policy,
    prompts: Sequence[Sequence[int]],
    token_ids: Tensor,
    passes: ResponsePasses,
    cache: DynamicCache,
    go_on: GoOn,
) -> Iterator[tuple[Tensor, Scored]]:
    forward = policy.output_layer.hidden_states
    started = run_prompts(forward, prompts, cache, policy.pad_id, policy.device, go_on, policy.sharing)
    yield started.output[:, -1:], passes.first
    mask, lengths = started.mask, started.lengths
    for each in passes.passes:
        mask = None if mask is None else take_rows(mask, each.rows_before)
        lengths = take_rows(lengths, each.rows_before)
        columns = torch.arange(each.start, each.stop, device=policy.device)
        if mask is not None:
            mask = torch.nn.functional.pad(mask, (0, len(columns)), value=True)
        states = go_on(
            forward,
            functools.partial(_take_rows_of_cache, cache, each.rows_before),
            last=each is passes.passes[-1],
            input_ids=take_rows(token_ids[:, each.start : each.stop], each.responses),
            attention_mask=mask,
            position_ids=lengths[:, None] + columns,
            past_key_values=cache,
            use_cache=True,
        )
        yield states, each.scored


def _take_rows_of_cache(cache: DynamicCache, rows: Indices) -> None:
    for layer in cache.layers:
        layer.keys, layer.values = take_rows(layer.keys, rows), take_rows(layer.values, rows)


def _plain(
    policy: Policy, prompts: Sequence[Sequence[int]], token_ids: Tensor, prompt_of: Indices
) -> Iterator[tuple[Tensor, Scored]]:
    ids, mask = pad_left(prompts, policy.pad_id, policy.device)
    ids = torch.cat([take_rows(ids, prompt_of), token_ids[:, :-1]], dim=1)
    if mask is not None:
        mask = torch.nn.functional.pad(take_rows(mask, prompt_of), (0, token_ids.shape[1] - 1), value=True)
    states = policy.output_layer.hidden_states(
        input_ids=ids,
        # Without a mask and a cache transformers looks for several texts in a row, at the price of a mask.
        attention_mask=torch.ones_like(ids, dtype=torch.bool) if mask is None else mask,
        position_ids=positions_of(mask, ids),
        use_cache=False,
    )
    every = np.arange(token_ids.numel())
    yield states[:, -token_ids.shape[1] :], Scored(every, every)
