"""Attention in which a group of heads reads its shared keys and values in place.

Beside a mask, which prompts of several lengths and shared prompts need, transformers gives every head a copy of its
group's: with six heads a group, most of a sampled token's time.  PyTorch's kernel for CPUs takes both.  Of a sampled
token the heads of a group go as rows of one head, so that their keys and values are read once.  The sums are rounded
differently.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface

_NAME = "sdpa_grouped"


def group_heads(model: Any, device: torch.device) -> None:
    """Let a model attend in this way where its attention is PyTorch's and its heads share keys and values.

    Only models that look their attention up by its name can, and only a CPU gains by it; the others are left as they
    are.

    Args:
        model: a Hugging Face model.
        device: where it computes.
    """
    text = model.config.get_text_config()
    heads = getattr(text, "num_attention_heads", None)
    if (
        device.type == "cpu"
        and model.config._attn_implementation == "sdpa"
        and getattr(model, "_supports_attention_backend", False)
        and getattr(text, "num_key_value_heads", heads) != heads
    ):
        model.set_attn_implementation(_NAME)


def _attention(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    (rows, heads, tokens, size), groups = query.shape, key.shape[1]
    plain = attention_mask is None and tokens > 1
    if plain or heads == groups or (attention_mask is not None and attention_mask.ndim != 4):
        attended: tuple[Tensor, None] = sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
        return attended
    mask = None if attention_mask is None else attention_mask[..., : key.shape[-2]]
    if tokens == 1:
        query = query.reshape(rows, groups, heads // groups, size)
    output = scaled_dot_product_attention(
        query, key, value, attn_mask=mask, scale=kwargs.get("scaling"), enable_gqa=tokens > 1
    )
    return output.reshape(rows, heads, tokens, size).transpose(1, 2).contiguous(), None


AttentionInterface.register(_NAME, _attention)
AttentionMaskInterface.register(_NAME, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
