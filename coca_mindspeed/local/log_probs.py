"""Log-probs of given responses under the policy, with gradient: the forward pass of the update."""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from transformers import DynamicCache

from coca_mindspeed.algorithm.objective import Objective
from coca_mindspeed.local.output_layer import TokenScores, scores_of_logits
from coca_mindspeed.local.policy import Policy
from coca_mindspeed.local.prompt_pass import pad_left, positions_of, run_prompts, shared_start
from coca_mindspeed.local.separate_backward import GoOn, go_on, go_on_separately


@dataclass(frozen=True)
class _Groups:
    """How many rows follow each prompt."""

    sizes: Sequence[int]

    @classmethod
    def of(cls, prompts: int, rows: int, sizes: Sequence[int] | None) -> "_Groups":
        if sizes is None:
            if rows % prompts:
                raise ValueError(f"token_ids has {rows} rows, expected a multiple of the {prompts} prompts")
            sizes = [rows // prompts] * prompts
        if len(sizes) != prompts or sum(sizes) != rows:
            raise ValueError(f"group_sizes {list(sizes)} should name {prompts} prompts and {rows} rows in all")
        return cls(sizes)

    def repeat(self, of_prompts: Tensor) -> Tensor:
        """Rows from what has one for each prompt; what has one for each response already is left as it is."""
        if len(of_prompts) == sum(self.sizes):
            return of_prompts
        if len(set(self.sizes)) == 1:
            return of_prompts.repeat_interleave(self.sizes[0], dim=0)
        return of_prompts[self._prompt_of_row(of_prompts.device)]

    def repeat_cache(self, cache: DynamicCache) -> None:
        """The same for keys and values, in place."""
        if len(set(self.sizes)) == 1:
            cache.batch_repeat_interleave(self.sizes[0])
        else:
            cache.batch_select_indices(self._prompt_of_row(cache.layers[0].keys.device))

    def _prompt_of_row(self, device: torch.device) -> Tensor:
        return torch.tensor([prompt for prompt, size in enumerate(self.sizes) for _ in range(size)], device=device)


def response_log_probs(
    policy: Policy,
    prompts: Sequence[Sequence[int]],
    token_ids: Tensor,
    *,
    temperature: float,
    share_prompts: bool = True,
) -> Tensor:
    """Log-prob of every response token, float32 ``[P * G, tokens]``; see :func:`response_scores`."""
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
    """Log-prob and entropy of every response token.

    Few logits are computed at once; many, a chunk of tokens at a time, and once more in the backward pass.  The result
    is the same (:mod:`coca_mindspeed.local.output_layer`).

    Args:
        policy: the policy.
        prompts: P prompts.
        token_ids: int64 ``[P * G, tokens]``, whole groups; what stands behind a response's end is computed as well
            and means nothing.
        temperature: as in sampling.
        share_prompts: run each prompt once and let its group's responses attend to its keys and values, gradient
            included.  The result is the same; the prompt's share of the work is divided by G.
        group_sizes: how many rows belong to each prompt, where groups are not all of one size.

    Returns:
        float32 ``[P * G, tokens]`` each.
    """
    return ResponseBatch(policy, prompts, token_ids, temperature, share_prompts, group_sizes).scores()


@dataclass(frozen=True)
class ResponseBatch:
    """Responses of which the policy is asked; the attributes are the arguments of :func:`response_scores`."""

    policy: Policy
    prompts: Sequence[Sequence[int]]
    token_ids: Tensor
    temperature: float
    share_prompts: bool = True
    group_sizes: Sequence[int] | None = None

    def scores(self) -> TokenScores:
        """See :func:`response_scores`."""
        if self._fits_one_chunk:
            return self._scores_at_once()
        with self.policy.autocast():
            return self.policy.output_layer.scores(self._joined_states(), self.token_ids, self._as_policy)

    def backward(self, objective_of: Callable[[Tensor], Objective]) -> tuple[Objective, TokenScores]:
        """Add up the gradient of the objective of the same log-probs; its logits are made once, however many they are.

        Args:
            objective_of: from log-probs ``[P * G, tokens]``; its loss is a sum of terms of one token's log-prob each.

        Returns:
            The objective and the scores, for reading.
        """
        if self._fits_one_chunk:
            log_probs, entropy = self._scores_at_once()
            objective = objective_of(log_probs)
            objective.loss.backward()
            return objective._replace(loss=objective.loss.detach()), TokenScores(log_probs.detach(), entropy)
        with self.policy.autocast():
            states = self._joined_states()
            _, scores = self.policy.output_layer.backward(
                states, self.token_ids, self._as_policy, lambda log_probs: objective_of(log_probs).loss
            )
        return objective_of(scores.log_probs), scores

    @cached_property
    def _groups(self) -> _Groups:
        return _Groups.of(len(self.prompts), len(self.token_ids), self.group_sizes)

    @property
    def _fits_one_chunk(self) -> bool:
        return self.policy.output_layer.fits_one_chunk(self.token_ids.numel())

    def _as_policy(self, logits: Tensor) -> Tensor:
        return self.policy.logits_of_policy(logits, self.temperature)

    def _joined_states(self) -> Tensor:
        """Hidden states that predict the responses' tokens, ``[P * G, tokens, hidden]``."""
        return torch.cat([self._groups.repeat(part) for part in self._states(go_on_separately)], dim=1)

    def _scores_at_once(self) -> TokenScores:
        """Log-prob and entropy of every token, from all logits."""
        with self.policy.autocast():
            # Each part's logits come before the next part's pass: autograd adds up gradients in the order of the
            # forward.
            parts = [self.policy.output_layer.logits(part) for part in self._states(go_on)]
            logits = torch.cat([self._groups.repeat(part) for part in parts], dim=1)
        return scores_of_logits(self._as_policy(logits), self.token_ids)

    def _states(self, go_on: GoOn) -> Iterator[Tensor]:
        cache = DynamicCache(config=self.policy.model.config)
        # With nothing to share a pass for the prompts would be one more and save none.
        if self.share_prompts and (max(self._groups.sizes) > 1 or shared_start(self.prompts, cache)):
            return _shared(self.policy, self.prompts, self.token_ids, self._groups, cache, go_on)
        return _plain(self.policy, self.prompts, self.token_ids, self._groups)


def _shared(
    policy: Policy,
    prompts: Sequence[Sequence[int]],
    token_ids: Tensor,
    groups: _Groups,
    cache: DynamicCache,
    go_on: GoOn,
) -> Iterator[Tensor]:
    """Hidden states that predict the responses: of the first tokens ``[P, 1, hidden]``, and of the others."""
    forward = policy.output_layer.hidden_states
    started = run_prompts(forward, prompts, cache, policy.pad_id, policy.device, go_on)
    yield started.output[:, -1:]  # a prompt's last state predicts the response's first token
    if token_ids.shape[1] == 1:
        return
    lengths = groups.repeat(started.lengths)
    offsets = torch.arange(token_ids.shape[1] - 1, device=policy.device)
    mask = started.mask
    if mask is not None:
        inside = torch.ones_like(token_ids[:, 1:], dtype=torch.bool)
        mask = torch.cat([groups.repeat(mask), inside], dim=1)
    yield go_on(
        forward,
        functools.partial(groups.repeat_cache, cache),
        last=True,
        input_ids=token_ids[:, :-1],
        attention_mask=mask,
        position_ids=lengths[:, None] + offsets,
        past_key_values=cache,
        use_cache=True,
    )


def _plain(policy: Policy, prompts: Sequence[Sequence[int]], token_ids: Tensor, groups: _Groups) -> Iterator[Tensor]:
    """Hidden states that predict the responses' tokens, ``[P * G, tokens, hidden]``."""
    ids, mask = pad_left(prompts, policy.pad_id, policy.device)
    ids = torch.cat([groups.repeat(ids), token_ids[:, :-1]], dim=1)
    if mask is not None:
        inside = torch.ones_like(token_ids[:, 1:], dtype=torch.bool)
        mask = torch.cat([groups.repeat(mask), inside], dim=1)
    states = policy.output_layer.hidden_states(
        input_ids=ids,
        # Without a mask and a cache transformers looks for several texts in a row, at the price of a mask.
        attention_mask=torch.ones_like(ids, dtype=torch.bool) if mask is None else mask,
        position_ids=positions_of(mask, ids),
        use_cache=False,
    )
    yield states[:, -token_ids.shape[1] :]
