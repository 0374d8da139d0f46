"""Activation checkpointing: decoder layers keep only their input and run again in the backward pass."""

import copy
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint
from transformers import Cache
from transformers.modeling_layers import GradientCheckpointingLayer


def checkpoint_activations(model: Any) -> None:
    """Activation checkpointing: every decoder layer keeps only its input and runs again in the backward pass.

    Transformers' own is inactive in eval mode (which disables dropout) and removes the KV cache (which shared prompts
    need).  Raises ValueError if no layer of the model supports it.
    """
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise ValueError(
            f"a {type(model).__name__} has no layers that can be recomputed; set model.gradient_checkpointing=false"
        )
    for layer in layers:
        layer.forward = functools.partial(_checkpointed, layer.forward)


def _checkpointed(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    # Architectures pass the cache under different names.
    cache = next((value for value in (*args, *kwargs.values()) if isinstance(value, Cache)), None)
    if cache is None:
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)
    # Layers replace their tensors and never write into them, so shallow copies keep the old state.
    before: dict[int, Any] = dict(enumerate(map(copy.copy, cache.layers)))
    recomputing = False

    def from_before(*args: Any, **kwargs: Any) -> Any:
        """Run on the cache as it was before this layer."""
        nonlocal recomputing
        view = copy.copy(cache)
        view.layers = _Layers(copy.copy(before.get(number)) for number in range(len(cache.layers)))
        output = forward(
            *(view if value is cache else value for value in args),
            **{name: view if value is cache else value for name, value in kwargs.items()},
        )
        if not recomputing:
            for number in before.keys() - view.layers.used:
                del before[number]  # not needed until the backward pass
            cache.layers[:], recomputing = view.layers, True
        return output

    return checkpoint(from_before, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)


class _Layers(list[Any]):
    """A cache's layers; records which of them were used."""

    def __init__(self, layers: Iterable[Any]) -> None:
        super().__init__(layers)
        self.used: set[int] = set()

    def __getitem__(self, number: Any) -> Any:
        self.used.update([number] if isinstance(number, int) else range(len(self))[number])
        return super().__getitem__(number)

    def __iter__(self) -> Iterator[Any]:
        return (self[number] for number in range(len(self)))
