"""Log-probs of given responses under the policy, with gradient: the forward pass of the update."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from transformers import DynamicCache

from coca_mindspeed.local.lm_head import TokenScores, scores_of_logits
from coca_mindspeed.local.policy import Policy
from coca_mindspeed.local.prefill import common_prefix_length, pad_left, positions_of, prefill_prompts


@dataclass(frozen=True)
class ResponseBatch:
    """Responses to score; :mod:`coca_mindspeed.local.lm_head` bounds the logits in memory.

    Attributes:
        policy: the policy.
        prompts: P prompts.
        token_ids: int64 ``[R, tokens]``, group by group; results behind a response's end are meaningless.
        temperature: as in sampling.
        share_prompts: run each prompt once; its responses attend to its keys and values, gradient included.
        group_sizes: rows of each prompt, if groups differ in size.
    """

    policy: Policy
    prompts: Sequence[Sequence[int]]
    token_ids: Tensor
    temperature: float
    share_prompts: bool = True
    group_sizes: Sequence[int] | None = None

    def scores(self) -> TokenScores:
        """Log-prob and entropy of every response token, float32 ``[R, tokens]`` each."""
        with self.policy.autocast():
            states = self._states()
            if not self._fits_one_chunk:
                return self.policy.lm_head.scores(states, self.token_ids, self._as_policy)
            logits = self.policy.lm_head.logits(states)
        return scores_of_logits(self._as_policy(logits), self.token_ids)

    def backward(self, loss_of: Callable[[Tensor], Tensor]) -> TokenScores:
        """Accumulate the gradient of a loss; return the scores, detached.  Logits are computed once.

        ``loss_of`` maps log-probs ``[R, tokens]`` to a sum of terms of one token's log-prob each.
        """
        if self._fits_one_chunk:
            log_probs, entropy = self.scores()
            loss_of(log_probs).backward()
            return TokenScores(log_probs.detach(), entropy)
        with self.policy.autocast():
            return self.policy.lm_head.backward(self._states(), self.token_ids, self._as_policy, loss_of)

    @cached_property
    def _prompt_of(self) -> Tensor:
        """The prompt of each response, int64 ``[R]``."""
        prompts, rows, sizes = len(self.prompts), len(self.token_ids), self.group_sizes
        if sizes is None:
            if rows % prompts:
                raise ValueError(f"token_ids has {rows} rows, expected a multiple of the {prompts} prompts")
            sizes = [rows // prompts] * prompts
        if len(sizes) != prompts or sum(sizes) != rows:
            raise ValueError(f"group_sizes {list(sizes)} should name {prompts} prompts and {rows} rows in all")
        return torch.tensor([p for p, size in enumerate(sizes) for _ in range(size)], device=self.policy.device)

    @property
    def _fits_one_chunk(self) -> bool:
        return self.policy.lm_head.fits_one_chunk(self.token_ids.numel())

    def _as_policy(self, logits: Tensor) -> Tensor:
        return self.policy.sampling_logits(logits, self.temperature)

    def _states(self) -> Tensor:
        """Hidden states that predict each response token, ``[R, tokens, hidden]``."""
        groups = len(self._prompt_of) > len(self.prompts)
        sharing = self.policy.sharing if self.share_prompts else "none"
        # With nothing to share, a separate prefill would be one more pass and save none.
        if sharing != "none" and (groups or common_prefix_length(self.prompts, sharing)):
            return self._states_behind_prefill()
        policy, rows = self.policy, self._prompt_of
        ids, mask = pad_left(self.prompts, policy.pad_id, policy.device)
        ids = torch.cat([ids[rows], self.token_ids[:, :-1]], dim=1)
        if mask is not None:
            mask = torch.nn.functional.pad(mask[rows], (0, self.token_ids.shape[1] - 1), value=True)
        states = policy.lm_head.hidden_states(
            input_ids=ids,
            # Without a mask and a cache transformers looks for several texts in a row, at the price of a mask.
            attention_mask=torch.ones_like(ids, dtype=torch.bool) if mask is None else mask,
            position_ids=positions_of(mask, ids),
            use_cache=False,
        )
        return states[:, -self.token_ids.shape[1] :]

    def _states_behind_prefill(self) -> Tensor:
        policy, rows, width = self.policy, self._prompt_of, self.token_ids.shape[1]
        forward, cache = policy.lm_head.hidden_states, DynamicCache(config=policy.model.config)
        started = prefill_prompts(forward, self.prompts, cache, policy.pad_id, policy.device, policy.sharing)
        first = _take_rows(started.output[:, -1:], rows)
        if width == 1:
            return first
        for layer in cache.layers:
            layer.keys, layer.values = _take_rows(layer.keys, rows), _take_rows(layer.values, rows)
        mask = started.mask
        if mask is not None:
            mask = torch.nn.functional.pad(mask[rows], (0, width - 1), value=True)
        states = forward(
            input_ids=self.token_ids[:, :-1],
            attention_mask=mask,
            position_ids=started.lengths[rows, None] + torch.arange(width - 1, device=policy.device),
            cache=cache,
            use_cache=True,
        )
        return torch.cat([first, states], dim=1)


def _take_rows(tensor: Tensor, rows: Tensor) -> Tensor:
    """``tensor[rows]``; a CPU's index_select is faster, a GPU's gradient by brackets is deterministic."""
    return tensor.index_select(0, rows) if tensor.device.type == "cpu" else tensor[rows]
