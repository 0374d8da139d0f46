"""Attention for grouped queries, for short texts on a CPU, and fast causal masks.

With a mask, transformers copies the keys and values of each group for every head, and transformers 4 computes the
mask by `torch.vmap` at every token.  Here heads of a group share keys and values in place, the mask is two comparisons,
and short texts use plain matrix products, which are faster than the kernel.  Sums are rounded differently.
"""

import inspect
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface, causal_mask_function

_GROUPED, _MASKED = "sdpa_grouped", "sdpa_masked"
#: Per row and head, matrix products beat the kernel with at least so many numbers and at most so many query-key
#: pairs (``benchmarks/README.md``).
_LEAST_NUMBERS, _MOST_PAIRS = 1024, 1024
_transformers_mask = ALL_MASK_ATTENTION_FUNCTIONS["sdpa"]
_MASK_BY_VMAP = "cache_position" in inspect.signature(_transformers_mask).parameters  # transformers 5 compares as well


def use_fast_attention(model: Any, device: torch.device) -> None:
    """Use this module's attention if the model selects PyTorch's by name; on CUDA, cuDNN's kernel is switched off."""
    if device.type == "cuda":
        # From PyTorch 2.11 the first choice on an H100: NaN gradients with a mask and 64, 192, ... tokens, in bfloat16
        # (pytorch/pytorch#196678).
        torch.backends.cuda.enable_cudnn_sdp(False)
    if model.config._attn_implementation != "sdpa" or not getattr(model, "_supports_attention_backend", False):
        return
    text = model.config.get_text_config()
    heads = getattr(text, "num_attention_heads", None)
    grouped = getattr(text, "num_key_value_heads", heads) != heads
    on_cpu = device.type == "cpu" and (grouped or _uses_transformers_mask(model))
    if on_cpu or (device.type == "cuda" and grouped and _uses_transformers_mask(model)):
        model.set_attn_implementation(_GROUPED)
    elif _MASK_BY_VMAP and _uses_transformers_mask(model):
        model.set_attn_implementation(_MASKED)


def _uses_transformers_mask(model: Any) -> bool:
    """Whether the model's code calls transformers' mask function (OPT's does not)."""
    return hasattr(inspect.getmodule(type(model)), "create_causal_mask")


def _attention(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    (rows, heads, tokens, size), groups = query.shape, key.shape[1]
    mask = None if attention_mask is None or attention_mask.ndim != 4 else attention_mask[..., : key.shape[-2]]
    on_cpu = query.device.type == "cpu"
    exact = on_cpu and query.dtype == torch.float32  # in bfloat16, matrix products would round the scores
    if exact and tokens > 1 and mask is not None and mask.dtype == torch.bool and not kwargs.get("dropout"):
        pairs = tokens * key.shape[-2]
        if pairs * size >= _LEAST_NUMBERS and pairs <= _MOST_PAIRS:
            scaling = kwargs.get("scaling") or size**-0.5
            return _matmul_attention(query * scaling, key, value, mask).transpose(1, 2).contiguous(), None
    plain = tokens > 1 and (attention_mask is None or not on_cpu)
    if plain or heads == groups or (attention_mask is not None and mask is None):
        attended: tuple[Tensor, None] = sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
        return attended
    if tokens == 1:
        query = query.reshape(rows, groups, heads // groups, size)
    output = scaled_dot_product_attention(
        query, key, value, attn_mask=mask, scale=kwargs.get("scaling"), enable_gqa=tokens > 1
    )
    return output.reshape(rows, heads, tokens, size).transpose(1, 2).contiguous(), None


def _matmul_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """Attention ``[rows, heads, queries, size]`` of scaled queries, the heads of a group as rows of one product.

    Keys and values are ``[rows, groups, keys, size]``.  The mask is bool ``[rows, 1, queries, keys]``, True where a
    query attends; a row of False is padding.
    """
    heads = (key.shape[1], query.shape[1] // key.shape[1])
    each = (heads[1], query.shape[2])
    scores = query.unflatten(1, heads).flatten(2, 3) @ key.transpose(2, 3)
    hidden = ~mask[:, :, None]
    weights = scores.unflatten(2, each).masked_fill(hidden, torch.finfo(scores.dtype).min).softmax(dim=-1)
    attended: Tensor = (weights.flatten(2, 3) @ value).unflatten(2, each).flatten(1, 2)
    return attended


def _causal_mask(
    batch_size: int,
    cache_position: Tensor,
    kv_length: int,
    kv_offset: int = 0,
    mask_function: Any = causal_mask_function,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    **kwargs: Any,
) -> Tensor | None:
    """Transformers' mask function, computed here for plain causal masks.

    Returns bool ``[rows, 1, queries, columns]``, True where a query attends; None if the kernel needs no mask.
    """
    end = kv_offset + kv_length
    if (
        mask_function is not causal_mask_function
        or local_size is not None
        or (attention_mask is not None and attention_mask.shape[-1] < end)
    ):
        windowed: Tensor | None = _transformers_mask(
            batch_size=batch_size,
            cache_position=cache_position,
            kv_length=kv_length,
            kv_offset=kv_offset,
            mask_function=mask_function,
            attention_mask=attention_mask,
            local_size=local_size,
            allow_is_causal_skip=allow_is_causal_skip,
            **kwargs,
        )
        return windowed
    inside = None if attention_mask is None else attention_mask[:, kv_offset:end]
    queries = len(cache_position)
    if allow_is_causal_skip and queries in (1, kv_length) and (inside is None or bool(inside.all())):
        return None
    seen = torch.arange(kv_offset, end, device=cache_position.device) <= cache_position[:, None]
    if inside is None:
        return seen.expand(batch_size, 1, -1, -1)
    return seen & inside[:, None, None, :]


AttentionInterface.register(_GROUPED, _attention)
AttentionInterface.register(_MASKED, sdpa_attention_forward)
for _name in (_GROUPED, _MASKED):
    AttentionMaskInterface.register(_name, _causal_mask if _MASK_BY_VMAP else _transformers_mask)
