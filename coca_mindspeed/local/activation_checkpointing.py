"""Gradient checkpointing: each decoder layer keeps its input alone, and runs once more in the backward pass.

Transformers' own does nothing while a model is in eval mode, which keeps dropout out of the log-probs, and takes the KV
cache away, which shared prompts need.
"""

import copy
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint
from transformers import Cache
from transformers.modeling_layers import GradientCheckpointingLayer


def recompute_layers(model: Any) -> None:
    """Make every decoder layer of ``model`` recompute its activations wherever there is a backward pass.

    Raises:
        ValueError: it has no layers that are made for it.
    """
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise ValueError(f"a {type(model).__name__} has no layers that can be recomputed")
    for layer in layers:
        layer.forward = functools.partial(_recomputed, layer.forward)


def _recomputed(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    # Under several names, or under none: architectures differ.
    cache = next((value for value in (*args, *kwargs.values()) if isinstance(value, Cache)), None)
    if cache is None:
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)
    # A layer replaces its tensors, it never writes into them, so that copies of the cache's layers are as they were.
    before: dict[int, Any] = dict(enumerate(map(copy.copy, cache.layers)))
    recomputing = False

    def from_before(*args: Any, **kwargs: Any) -> Any:
        """Run on the cache as it was; the second time, the real one has gone on."""
        nonlocal recomputing
        view = copy.copy(cache)
        view.layers = _Layers(copy.copy(before.get(number)) for number in range(len(cache.layers)))
        output = forward(
            *(view if value is cache else value for value in args),
            **{name: view if value is cache else value for name, value in kwargs.items()},
        )
        if not recomputing:
            for number in before.keys() - view.layers.used:
                del before[number]  # which would be held until the backward pass
            cache.layers[:], recomputing = view.layers, True
        return output

    return checkpoint(from_before, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)


class _Layers(list[Any]):
    """A cache's layers, and the numbers of those that were asked for."""

    def __init__(self, layers: Iterable[Any]) -> None:
        super().__init__(layers)
        self.used: set[int] = set()

    def __getitem__(self, number: Any) -> Any:
        self.used.update([number] if isinstance(number, int) else range(len(self))[number])
        return super().__getitem__(number)

    def __iter__(self) -> Iterator[Any]:
        return (self[number] for number in range(len(self)))
