"""Prefill: a batch of prompts into a preallocated KV cache, a common prefix computed once."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import DynamicCache

from coca_mindspeed.local.plain import PLAIN, DynamicLayer, PlainCache
from coca_mindspeed.local.policy import Policy, Sharing

_GROWTH = 1.5  # capacity factor; room for the longest response from the start would be unused by most rows
_LEAST_ROOM = 16  # tokens
SMALL_BYTES = 2**24  # bytes per layer; up to this, all future rows are allocated at once


class PreallocatedCache(DynamicCache):
    """An empty cache for at most ``most`` tokens (None: unknown); layers with a window keep transformers' own."""

    layers: list[Any]

    def __init__(self, config: Any, most: int | None = None) -> None:
        super().__init__(config=config)
        self.layers = [_PreallocatedLayer(most) if type(layer) is DynamicLayer else layer for layer in self.layers]

    def repeat_rows(self, rows: Tensor, current: int, capacity: int) -> None:
        """Append copies of ``rows`` (int64) to a cache of ``current`` rows; usually only these are copied.

        From now on it never holds more than ``capacity`` rows.
        """
        for layer in self.layers:
            if isinstance(layer, _PreallocatedLayer):
                layer.repeat_rows(rows, capacity)
            else:
                layer.batch_select_indices(torch.cat([torch.arange(current, device=rows.device), rows]))


class _PreallocatedLayer(DynamicLayer):
    """Keys and values ``[rows, heads, tokens, size]`` as views of larger buffers."""

    is_initialized: bool

    def __init__(self, most: int | None) -> None:
        super().__init__()
        self._most = most
        self._buffers: tuple[Tensor, Tensor] | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:  # prompts, before they are repeated
            # transformers' lazy_initialization has other arguments in each release.
            self.dtype, self.device = key_states.dtype, key_states.device
            self.is_initialized = True
            self.keys, self.values = key_states.contiguous(), value_states.contiguous()
            return self.keys, self.values
        start, new = self.keys.shape[-2], key_states.shape[-2]
        if self._buffers is None or self._buffers[0].shape[-2] < start + new:
            self._move(tokens=start + new)
        assert self._buffers is not None
        for buffer, states in zip(self._buffers, (key_states, value_states), strict=True):
            buffer[: len(states), :, start : start + new] = states
        self._use(len(key_states), start + new)
        return self.keys, self.values

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._move(tokens=self.keys.shape[-2] + 1, repeats=repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        if self._buffers is None:
            self._move(tokens=self.keys.shape[-2] + 1)
        assert self._buffers is not None
        keys, values = self._buffers
        # index_select is three times as fast as indexing.
        self._buffers = (keys.index_select(0, indices), values.index_select(0, indices))
        self._use(len(indices), self.keys.shape[-2])

    def repeat_rows(self, rows: Tensor, most: int) -> None:
        before, used = len(self.keys), self.keys.shape[-2]
        if self._buffers is None or len(self._buffers[0]) < before + len(rows):
            small = most * self.keys[0].nbytes <= SMALL_BYTES
            self._move(
                tokens=used + 1, more_rows=max(len(rows), most - before if small else min(before, most - before))
            )
        assert self._buffers is not None
        for buffer in self._buffers:
            buffer[before : before + len(rows), :, :used] = buffer[:, :, :used].index_select(0, rows)
        self._use(before + len(rows), used)

    def _use(self, rows: int, tokens: int) -> None:
        assert self._buffers is not None
        keys, values = self._buffers
        self.keys, self.values = keys[:rows, :, :tokens], values[:rows, :, :tokens]

    def _move(self, tokens: int, repeats: int = 1, more_rows: int = 0) -> None:
        """Copy into buffers with room for more than ``tokens``, each row ``repeats`` times, and ``more_rows``."""
        used = self.keys.shape[-2]
        room = max(int(_GROWTH * tokens), tokens + _LEAST_ROOM)
        if self._most is not None:
            room = max(tokens, min(room, self._most))
        moved = []
        for old in (self.keys, self.values):
            rows, heads, _, size = old.shape
            buffer = torch.empty(rows * repeats + more_rows, heads, room, size, dtype=old.dtype, device=old.device)
            buffer[: rows * repeats].unflatten(0, (rows, repeats))[:, :, :, :used] = old[:, None]
            moved.append(buffer)
        self._buffers = (moved[0], moved[1])
        self._use(len(self.keys) * repeats, used)


_MIN_SHARED_TOKENS = 16  # tokens; a separate pass for a shorter prefix costs more than it saves


class Prefill(NamedTuple):
    """Result of a prefill of P prompts."""

    # of `forward` for the prompts' last tokens, `[P, tokens, ...]`; the last column is each prompt's end
    output: Any
    mask: Tensor | None  # bool `[P, width]` of the cache's columns, False on padding; None without padding
    lengths: Tensor  # int64 `[P]`, tokens of each prompt
    width: int  # columns of the cache


def prefilled(
    policy: Policy, prompts: Sequence[Sequence[int]], max_new_tokens: int | None
) -> tuple[PreallocatedCache, Prefill]:
    """Prefill a new cache with prompts, one row each; it has room for ``max_new_tokens`` more (None: unknown)."""
    most = None if max_new_tokens is None else max(map(len, prompts)) + max_new_tokens
    cache = PlainCache() if PLAIN else PreallocatedCache(policy.model.config, most)
    forward = policy.lm_head.hidden_states
    return cache, prefill_prompts(forward, prompts, cache, policy.pad_id, policy.device, policy.sharing)


def prefill_prompts(
    forward: Callable[..., Any],
    prompts: Sequence[Sequence[int]],
    cache: DynamicCache,
    pad_id: int,
    device: torch.device,
    sharing: Sharing = "prefix",
) -> Prefill:
    """Fill an empty cache with prompts, one row each, padded on the left.

    ``forward`` is :meth:`.LMHead.hidden_states` or the like.  With ``sharing`` = ``prefix``, a common prefix is run
    once.
    """
    shared = common_prefix_length(prompts, sharing)
    if shared:
        start = torch.tensor([prompts[0][:shared]], device=device)
        positions = torch.arange(shared, device=device)[None]
        forward(input_ids=start, attention_mask=None, position_ids=positions, cache=cache, use_cache=True)
    ids, mask = pad_left([prompt[shared:] for prompt in prompts], pad_id, device)
    positions = positions_of(mask, ids) + shared
    if mask is not None and shared:
        mask = torch.nn.functional.pad(mask, (shared, 0), value=True)
    if shared:
        cache.batch_repeat_interleave(len(prompts))
    output = forward(input_ids=ids, attention_mask=mask, position_ids=positions, cache=cache, use_cache=True)
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
    return Prefill(output, mask, lengths, shared + ids.shape[1])


def common_prefix_length(prompts: Sequence[Sequence[int]], sharing: Sharing = "prefix") -> int:
    """Length of the prompts' common prefix in tokens; 0 if it is too short, or ``sharing`` is not ``prefix``.

    The prefix leaves each prompt at least one token of its own.
    """
    if len(prompts) == 1 or sharing != "prefix":
        return 0
    first, last = min(map(list, prompts)), max(map(list, prompts))  # their common prefix is everyone's
    same = next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first))
    same = min(same, min(map(len, prompts)) - 1)
    return same if same >= _MIN_SHARED_TOKENS else 0


def pad_left(prompts: Sequence[Sequence[int]], pad_id: int, device: torch.device) -> tuple[Tensor, Tensor | None]:
    """Prompts as ids ``[P, longest]`` and their bool mask; None without padding."""
    width = max(map(len, prompts))
    ids = torch.tensor([[pad_id] * (width - len(p)) + list(p) for p in prompts], device=device)
    if all(len(p) == width for p in prompts):
        return ids, None
    lengths = torch.tensor([len(p) for p in prompts], device=device)
    return ids, torch.arange(width, device=device) >= (width - lengths)[:, None]


def positions_of(mask: Tensor | None, ids: Tensor) -> Tensor:
    """Positions counted from each prompt's first real token, int64 ``[rows, tokens]``."""
    if mask is None:
        return torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    return (mask.long().cumsum(dim=1) - 1).clamp(min=0)
