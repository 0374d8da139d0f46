"""The same numbers as by transformers' own way: shared keys and values without copies, masks without vmap."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AttentionInterface, AutoModelForCausalLM, Qwen2Config, masking_utils
from transformers.integrations import sdpa_attention
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    causal_mask_function,
    sliding_window_causal_mask_function,
)

from coca_mindspeed.local import attention
from coca_mindspeed.local.attention import use_fast_attention

needs_vmap = pytest.mark.skipif(not hasattr(masking_utils, "_vmap_for_bhqkv"), reason="transformers 5 uses no vmap")


def tiny_model(kv_heads, attention="sdpa"):
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "vocab_size": 50}
    heads = {"num_attention_heads": 4, "num_key_value_heads": kv_heads}
    return AutoModelForCausalLM.from_config(Qwen2Config(**shape, **heads), attn_implementation=attention)


@pytest.mark.parametrize(("device", "kept"), [("cpu", True), ("cuda", False)])
def test_on_cuda_the_kernel_with_nan_gradients_is_off(device, kept):
    before = torch.backends.cuda.cudnn_sdp_enabled()
    try:
        torch.backends.cuda.enable_cudnn_sdp(True)
        use_fast_attention(tiny_model(2), torch.device(device))
        assert torch.backends.cuda.cudnn_sdp_enabled() is kept
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


@pytest.mark.parametrize("groups", [1, 2, 6])
@pytest.mark.parametrize(
    ("tokens", "keys", "matmul_tokens"), [(7, 18, True), (2, 3, False), (16, 64, True), (16, 65, False)]
)
def test_short_texts_are_attended_to_by_products(tokens, keys, matmul_tokens, groups, monkeypatch):
    """With the kernel's result and gradient; what is long, or is next to nothing, is the kernel's."""
    asked, kernel = [], attention.scaled_dot_product_attention

    def watched(*arguments, **options):
        asked.append(1)
        return kernel(*arguments, **options)

    monkeypatch.setattr(attention, "scaled_dot_product_attention", watched)
    monkeypatch.setattr(sdpa_attention.torch.nn.functional, "scaled_dot_product_attention", watched)
    random = torch.Generator().manual_seed(0)
    query = torch.randn(5, tokens, 6, 16, generator=random).transpose(1, 2).requires_grad_()
    key, value = (torch.randn(5, groups, keys, 16, generator=random, requires_grad=True) for _ in range(2))
    seen = torch.arange(keys) <= torch.arange(keys - tokens, keys)[:, None]
    mask = (seen & (torch.arange(keys) >= torch.arange(5)[:, None, None].clamp(max=keys - tokens)))[:, None]
    out = torch.randn(5, tokens, 6, 16, generator=random)
    found, _ = AttentionInterface()["sdpa_grouped"](torch.nn.Module(), query, key, value, mask)
    assert bool(asked) != matmul_tokens
    gradients = torch.autograd.grad((found * out).sum(), (query, key, value))
    expected = kernel(query, key, value, attn_mask=mask, enable_gqa=True).transpose(1, 2)
    torch.testing.assert_close(found, expected)
    for gradient, other in zip(
        gradients, torch.autograd.grad((expected * out).sum(), (query, key, value)), strict=True
    ):
        torch.testing.assert_close(gradient, other, atol=1e-5, rtol=1e-4)


def test_a_query_that_sees_nothing_spoils_nothing():
    """Padding on the left; its result means nothing, and its gradient is a number."""
    query, key, value = (torch.randn(2, 2, 8, 16, requires_grad=True) for _ in range(3))
    mask = torch.ones(8, 8).tril().bool().repeat(2, 1, 1, 1)
    mask[0, :, :, :3] = False
    found, _ = AttentionInterface()["sdpa_grouped"](torch.nn.Module(), query, key, value, mask)
    found[:, 3:].sum().backward()
    assert all(bool(tensor.grad.isfinite().all()) for tensor in (query, key, value))
    assert bool(found.isfinite().all())


@needs_vmap
@given(
    rows=st.integers(1, 4),
    queries=st.integers(1, 5),
    before=st.integers(0, 6),
    offset=st.integers(0, 2),
    masked=st.sampled_from(["not", "left", "anywhere", "for more", "for fewer"]),
    skip=st.booleans(),
    window=st.sampled_from([None, 3]),
    seed=st.integers(0, 9),
)
def test_masks_are_transformers_own(rows, queries, before, offset, masked, skip, window, seed):
    """Of prompts, of responses behind them and of single tokens; windows are left to transformers."""
    columns = before + queries
    mask = None
    if masked != "not":
        width = offset + columns + {"for more": 2, "for fewer": -1}.get(masked, 0)
        mask = torch.rand(rows, width, generator=torch.Generator().manual_seed(seed)) < 0.7
        if masked == "left":
            mask = mask.long().cummax(dim=1).values.bool()
    arguments = {
        "batch_size": rows,
        "cache_position": torch.arange(queries) + offset + before,
        "kv_length": columns,
        "kv_offset": offset,
        "mask_function": causal_mask_function if window is None else sliding_window_causal_mask_function(window),
        "attention_mask": mask,
        "local_size": window,
        "allow_is_causal_skip": skip,
    }
    ours, theirs = (ALL_MASK_ATTENTION_FUNCTIONS[name](**arguments) for name in ("sdpa_grouped", "sdpa"))
    if theirs is None:
        assert ours is None
    else:
        assert torch.equal(ours, theirs)
