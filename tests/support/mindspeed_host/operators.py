"""NPU operators that MindSpeed calls, written out in PyTorch, with the parameters of torch_npu 2.5.1."""

from collections.abc import Sequence

import torch
from torch import Tensor


def npu_swiglu(self: Tensor, dim: int = -1) -> Tensor:
    """``silu(a) * b`` for the two halves of ``self`` along ``dim``."""
    gate, up = self.chunk(2, dim=dim)
    return torch.nn.functional.silu(gate) * up


def npu_rms_norm(self: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    """RMS normalisation, computed in float32, and the reciprocal of the root mean square."""
    wide = self.float()
    reciprocal = torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
    return (wide * reciprocal).to(self.dtype) * gamma, reciprocal


def npu_rotary_mul(self: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half") -> Tensor:
    """Rotary position embedding in the layout of two halves; ``r1`` is the cosine, ``r2`` the sine."""
    if rotary_mode != "half":
        raise ValueError(f"npu_rotary_mul on the host: rotary_mode {rotary_mode!r} is not written out")
    first, second = self.chunk(2, dim=-1)
    return self * r1 + torch.cat([-second, first], dim=-1) * r2


def npu_fusion_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    head_num: int,
    input_layout: str,
    pse: Tensor | None = None,
    padding_mask: Tensor | None = None,
    atten_mask: Tensor | None = None,
    scale: float = 1.0,
    keep_prob: float = 1.0,
    pre_tockens: int = 2**31 - 1,
    next_tockens: int = 2**31 - 1,
    inner_precise: int = 0,
    prefix: Sequence[int] | None = None,
    actual_seq_qlen: Sequence[int] | None = None,
    actual_seq_kvlen: Sequence[int] | None = None,
    sparse_mode: int = 0,
    gen_mask_parallel: bool = True,
    sync: bool = False,
) -> tuple[Tensor]:
    """Attention as MindSpeed asks for it: causal where a mask is given, whatever its (compressed) form.

    Args:
        query: in ``input_layout``; ``key`` and ``value`` likewise, with as many heads or fewer.
        key: see ``query``.
        value: see ``query``.
        head_num: heads of ``query``.
        input_layout: ``SBH``, ``BNSD`` or ``TND`` (sequences packed one after the other).
        scale: of the scores.
        atten_mask: None for attention in both directions.
        actual_seq_qlen: for ``TND``, where each sequence ends.

    Raises:
        ValueError: for a layout, bias, padding mask, prefix or dropout that is not written out. The other arguments
            select the form of the mask or the kernel and are not read.
    """
    if keep_prob != 1 or any(argument is not None for argument in (pse, padding_mask, prefix)):
        raise ValueError("npu_fusion_attention on the host: pse, padding_mask, prefix and dropout are not written out")
    causal = atten_mask is not None

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:  # [batch, heads, tokens, head size]
        return torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )

    if input_layout == "BNSD":
        return (attend(query, key, value),)
    if input_layout == "SBH":
        size = query.shape[2] // head_num
        heads = [t.unflatten(2, (-1, size)).permute(1, 2, 0, 3) for t in (query, key, value)]
        return (attend(*heads).permute(2, 0, 1, 3).flatten(2),)
    if input_layout == "TND" and actual_seq_qlen is not None:
        ends = [int(end) for end in actual_seq_qlen]
        parts = [
            attend(*(t[start:end].transpose(0, 1)[None] for t in (query, key, value)))[0].transpose(0, 1)
            for start, end in zip([0, *ends], ends, strict=False)
            if end > start
        ]
        return (torch.cat(parts),)
    raise ValueError(f"npu_fusion_attention on the host: layout {input_layout!r} is not written out")


OPERATORS = {
    f"torch_npu.{operator.__name__}": operator
    for operator in (npu_swiglu, npu_rms_norm, npu_rotary_mul, npu_fusion_attention)
}
