"""A KV cache with room for the tokens to come: a step writes its keys and values into place and copies no others."""

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

_GROWTH = 1.5  # room for the longest response from the start would be memory that most rows never use
_LEAST_ROOM = 16  # tokens


def growing_cache(config: Any, most: int | None = None) -> DynamicCache:
    """An empty cache for a model of this configuration; layers with a sliding window keep transformers' own.

    Args:
        config: the model's.
        most: tokens that it will ever hold, behind which there need be no room; None: nobody knows.
    """
    cache = DynamicCache(config=config)
    cache.layers = [_GrowingLayer(most) if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache


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
            self._move(repeats=1, tokens=start + new)
        assert self._buffers is not None
        keys, values = self._buffers
        keys[:, :, start : start + new] = key_states
        values[:, :, start : start + new] = value_states
        self.keys, self.values = keys[:, :, : start + new], values[:, :, : start + new]
        return self.keys, self.values

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._move(repeats, self.keys.shape[-2] + 1)

    def batch_select_indices(self, indices: Tensor) -> None:
        if self._buffers is None:
            super().batch_select_indices(indices)
            return
        used = self.keys.shape[-2]
        keys, values = self._buffers = (self._buffers[0][indices], self._buffers[1][indices])
        self.keys, self.values = keys[:, :, :used], values[:, :, :used]

    def skip_to(self, tokens: int) -> int:
        """See :func:`skip_to`."""
        assert self._buffers is not None
        keys, values = self._buffers
        self.keys, self.values = keys[:, :, :tokens], values[:, :, :tokens]
        return self.keys.shape[-2]

    def _move(self, repeats: int, tokens: int) -> None:
        """Into buffers with room for ``tokens`` and more, each row ``repeats`` times."""
        used = self.keys.shape[-2]
        room = max(int(_GROWTH * tokens), tokens + _LEAST_ROOM)
        if self._most is not None:
            room = max(tokens, min(room, self._most))
        moved = []
        for old in (self.keys, self.values):
            rows, heads, _, size = old.shape
            buffer = torch.empty(rows * repeats, heads, room, size, dtype=old.dtype, device=old.device)
            buffer.unflatten(0, (rows, repeats))[:, :, :, :used] = old[:, None]
            moved.append(buffer)
        self._buffers = (moved[0], moved[1])
        self.keys, self.values = moved[0][:, :, :used], moved[1][:, :, :used]
