"""A KV cache with room for what is to come: a step writes its keys and values into place and copies no others."""

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

_GROWTH = 1.5  # room for the longest response from the start would be memory that most rows never use
_LEAST_ROOM = 16  # tokens
_SMALL = 2**24  # bytes of keys or values of a layer; so little is taken for all rows to come at once


def growing_cache(config: Any, most: int | None = None) -> DynamicCache:
    """An empty cache for a model of this configuration; layers with a sliding window keep transformers' own.

    Args:
        config: the model's.
        most: tokens that it will ever hold, behind which there need be no room; None: nobody knows.
    """
    cache = DynamicCache(config=config)
    cache.layers = [_GrowingLayer(most) if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache


def repeat_rows(cache: DynamicCache, rows: Tensor, of: int, most: int) -> None:
    """Put rows once more behind those that there are; most often these alone are copied.

    Args:
        cache: with keys and values.
        rows: int64.
        of: rows that the cache has.
        most: rows that it will ever have from now on.
    """
    for layer in cache.layers:
        if isinstance(layer, _GrowingLayer):
            layer.repeat_rows(rows, most)
        else:
            layer.batch_select_indices(torch.cat([torch.arange(of, device=rows.device), rows]))


def skip_to(cache: DynamicCache, tokens: int) -> int:
    """Take the room that there is for tokens, up to so many in all, without filling it; the tokens it then holds."""
    return min((layer.skip_to(tokens) for layer in cache.layers if isinstance(layer, _GrowingLayer)), default=tokens)


def cache_bytes(cache: DynamicCache) -> int:
    """Bytes of keys and values, the room for more included."""
    tensors = [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors if tensor is not None)


class _GrowingLayer(DynamicLayer):
    """Keys and values ``[rows, heads, tokens, size]``, which are the used part of larger buffers."""

    is_initialized: bool

    def __init__(self, most: int | None) -> None:
        super().__init__()
        self._most = most
        self._buffers: tuple[Tensor, Tensor] | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:  # the prompts, before they are repeated
            # What transformers' lazy_initialization does, whose arguments differ between its releases.
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
        # Copies whole rows; brackets, which can do more, take three times as long.
        self._buffers = (keys.index_select(0, indices), values.index_select(0, indices))
        self._use(len(indices), self.keys.shape[-2])

    def repeat_rows(self, rows: Tensor, most: int) -> None:
        """See :func:`repeat_rows`."""
        before, used = len(self.keys), self.keys.shape[-2]
        if self._buffers is None or len(self._buffers[0]) < before + len(rows):
            small = most * self.keys[0].nbytes <= _SMALL
            self._move(
                tokens=used + 1, more_rows=max(len(rows), most - before if small else min(before, most - before))
            )
        assert self._buffers is not None
        for buffer in self._buffers:
            buffer[before : before + len(rows), :, :used] = buffer[:, :, :used].index_select(0, rows)
        self._use(before + len(rows), used)

    def skip_to(self, tokens: int) -> int:
        """See :func:`skip_to`."""
        self._use(len(self.keys), tokens)
        return self.keys.shape[-2]

    def _use(self, rows: int, tokens: int) -> None:
        """Let so much of the buffers be what the layer holds."""
        assert self._buffers is not None
        keys, values = self._buffers
        self.keys, self.values = keys[:rows, :, :tokens], values[:rows, :, :tokens]

    def _move(self, tokens: int, repeats: int = 1, more_rows: int = 0) -> None:
        """Into buffers with room for ``tokens`` and more, each row ``repeats`` times, and for more rows behind them."""
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
