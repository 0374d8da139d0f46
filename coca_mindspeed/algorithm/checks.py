"""Checks of tensor arguments."""

import torch
from torch import Tensor

_DTYPES = {
    "bool": (torch.bool,),
    "int": (torch.int64, torch.int32),
    "float": (torch.float64, torch.float32, torch.float16, torch.bfloat16),
}


def check_tensor(name: str, tensor: Tensor, kind: str, *shape: int | str, device: torch.device | None = None) -> None:
    """Raise ``ValueError`` unless a tensor is as expected.

    Args:
        kind: ``bool``, ``int`` or ``float``.
        shape: size of each dimension; a string names a dimension of any size.
        device: None allows any.
    """
    fits = tensor.dim() == len(shape) and all(
        isinstance(expected, str) or size == expected for size, expected in zip(tensor.shape, shape, strict=True)
    )
    if not fits or tensor.dtype not in _DTYPES[kind] or device not in (None, tensor.device):
        expected, found = (", ".join(map(str, sizes)) for sizes in (shape, tensor.shape))
        where, on = ("", "") if device is None else (f" on {device}", f" on {tensor.device}")
        raise ValueError(f"{name} should be {kind} [{expected}]{where}, found {tensor.dtype} [{found}]{on}")
