"""NPU operators that MindSpeed calls even where nothing fused is asked for, written out in PyTorch."""

import torch
from torch import Tensor


def npu_swiglu(x: Tensor, dim: int = -1) -> Tensor:
    """``silu(a) * b`` for the two halves of ``x`` along ``dim``."""
    gate, up = x.chunk(2, dim=dim)
    return torch.nn.functional.silu(gate) * up


def npu_rms_norm(x: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    """RMS normalisation, computed in float32, and the reciprocal of the root mean square."""
    wide = x.float()
    reciprocal = torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
    return (wide * reciprocal).to(x.dtype) * gamma, reciprocal


def npu_rotary_mul(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding in the layout of two halves."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


OPERATORS = {f"torch_npu.{f.__name__}": f for f in (npu_swiglu, npu_rms_norm, npu_rotary_mul)}
