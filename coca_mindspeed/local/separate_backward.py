"""A pass that goes on from a KV cache, with a backward pass of its own.

Where responses share their prompt's pass, every weight is used by two passes of one graph, and autograd holds what the
first to be differentiated says of it until the other has said its own: a second gradient of the whole model.  As one
node of the graph, a pass adds its gradients up before the pass that it goes on from begins.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from transformers import DynamicCache


class GoOn(Protocol):
    """How a pass goes on from a cache."""

    def __call__(
        self, forward: Callable[..., Tensor], repeat: Callable[[], None], *, last: bool = False, **inputs: Any
    ) -> Tensor:
        """What ``forward(**inputs)`` makes, once ``repeat()`` has given the cache its rows.

        Args:
            forward: hidden states from ``inputs``; ``past_key_values`` is the cache, filled.
            repeat: called before it.
            last: no further pass goes on from the cache, whose contents are not to be read any more.
            inputs: of ``forward``.
        """


def go_on(forward: Callable[..., Tensor], repeat: Callable[[], None], *, last: bool = False, **inputs: Any) -> Tensor:
    """One pass after the other, on one graph."""
    repeat()
    return forward(**inputs)


def go_on_separately(
    forward: Callable[..., Tensor], repeat: Callable[[], None], *, last: bool = False, **inputs: Any
) -> Tensor:
    """The same numbers and gradients, which have to be asked for by ``backward()``."""
    cache: DynamicCache = inputs["past_key_values"]
    before = _tensors(cache)
    if not torch.is_grad_enabled() or not any(tensor.requires_grad for tensor in before):
        return go_on(forward, repeat, **inputs)

    def from_cache(*cached: Tensor) -> tuple[Tensor, ...]:
        _fill(cache, cached)
        states = go_on(forward, repeat, **inputs)
        return (states,) if last else (states, *_tensors(cache))

    after: list[Tensor]
    states: Tensor
    states, *after = _Pass.apply(from_cache, *before)
    _fill(cache, before if last else after)  # in the place of those on the pass's own graph
    return states


def _tensors(cache: DynamicCache) -> list[Tensor]:
    return [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]


def _fill(cache: DynamicCache, tensors: Sequence[Tensor]) -> None:
    for layer, keys, values in zip(cache.layers, tensors[::2], tensors[1::2], strict=True):
        layer.keys, layer.values = keys, values


class _Pass(torch.autograd.Function):
    """What a function makes of tensors, on a graph of its own."""

    @staticmethod
    def forward(ctx: Any, function: Callable[..., tuple[Tensor, ...]], *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        with torch.enable_grad():
            leaves = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in inputs]
            outputs = function(*leaves)
        ctx.leaves, ctx.outputs = leaves, outputs
        found = tuple(output.detach() for output in outputs)
        ctx.mark_non_differentiable(*(new for new, old in zip(found, outputs, strict=True) if not old.requires_grad))
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        leaves, outputs = ctx.leaves, ctx.outputs
        del ctx.leaves, ctx.outputs  # and the graph with them
        asked = [number for number, gradient in enumerate(gradients) if gradient is not None]
        torch.autograd.backward([outputs[number] for number in asked], [gradients[number] for number in asked])
        return None, *(leaf.grad for leaf in leaves)
