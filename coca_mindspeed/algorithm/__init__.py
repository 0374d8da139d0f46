"""The paper as pure functions on tensors and strings, which all three engines call."""

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:  # configurations read this package without the seconds that torch takes
    import torch

#: How a loss is aggregated over tokens: ``sum`` is the paper's; see :func:`.objective.segment_objective`.
LossAggregation = Literal["sum", "token_mean", "segment_mean"]

#: Divisor of a group's centred rewards: see :class:`.methods.settings.MethodSettings`.
AdvantageScale = Literal["group", "batch", "none"]

_DTYPES = {
    "bool": ("torch.bool",),
    "int": ("torch.int64", "torch.int32"),
    "float": ("torch.float64", "torch.float32", "torch.float16", "torch.bfloat16"),
}


def check_tensor(
    name: str, tensor: "torch.Tensor", kind: str, *shape: int | str, device: "torch.device | None" = None
) -> None:
    """Raise ``ValueError`` unless a tensor is ``bool``, ``int`` or ``float``, of this shape, on ``device`` (None: any).

    A string in ``shape`` names a dimension of any size.
    """
    fits = tensor.dim() == len(shape) and all(
        isinstance(expected, str) or size == expected for size, expected in zip(tensor.shape, shape, strict=True)
    )
    if not fits or str(tensor.dtype) not in _DTYPES[kind] or device not in (None, tensor.device):
        expected, found = (", ".join(map(str, sizes)) for sizes in (shape, tensor.shape))
        where, on = ("", "") if device is None else (f" on {device}", f" on {tensor.device}")
        raise ValueError(f"{name} should be {kind} [{expected}]{where}, found {tensor.dtype} [{found}]{on}")
