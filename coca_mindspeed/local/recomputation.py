"""Gradient checkpointing: each decoder layer keeps its input alone, and runs once more in the backward pass.

Transformers' own does nothing while a model is in eval mode, which keeps dropout out of the log-probs, and takes the KV
cache away, which shared prompts need.
"""

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint
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
    cache = kwargs.get("past_key_values")
    if cache is None:
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)
    before = [copy.copy(layer) for layer in cache.layers]  # a layer replaces its tensors, it never writes into them
    recomputing = False

    def from_before(*args: Any, **kwargs: Any) -> Any:
        """Run on the cache as it was; the second time, the real one has gone on."""
        nonlocal recomputing
        view = copy.copy(cache)
        view.layers = [copy.copy(layer) for layer in before]
        output = forward(*args, **{**kwargs, "past_key_values": view})
        if not recomputing:
            cache.layers[:], recomputing = view.layers, True
        return output

    return checkpoint(from_before, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)
