"""The device of a run and its number formats."""

import importlib
import importlib.util
import re
from typing import Any, Literal

import torch

from coca_mindspeed.config.schema import DEVICE_PATTERN, ModelConfig
from coca_mindspeed.errors import ConfigError, Problem


def choose_device(name: str, *, where: str = "trainer.device") -> torch.device:
    """Resolve ``auto`` (CUDA if available, else NPU, else CPU), ``cpu``, ``cuda``, ``cuda:N``, ``npu`` or ``npu:N``.

    Raises:
        ConfigError: another name, or no such device; ``where`` is the key or option.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "npu" if _npu_count() else "cpu")
    if not re.fullmatch(DEVICE_PATTERN, name):
        raise ConfigError(f"{where}={name}: expected auto, cpu, cuda, cuda:N, npu or npu:N")
    if name.startswith("npu") and not _npu_count():  # torch knows the name once torch_npu is imported
        raise ConfigError(f"{where}={name}: PyTorch sees 0 NPU devices; is torch_npu installed?")
    device = torch.device(name)
    counts = {"cuda": torch.cuda.device_count, "npu": _npu_count}
    if device.type in counts and (device.index or 0) >= counts[device.type]():
        raise ConfigError(f"{where}={name}: PyTorch sees {counts[device.type]()} {device.type.upper()} devices")
    return device


def has_bfloat16(device: torch.device) -> bool:
    """Whether the device has bfloat16 instructions; False for a processor whose features PyTorch does not report."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    if device.type != "cpu":
        return True
    features = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    return any(features.get(name) for name in ("avx512_bf16", "amx_bf16"))


def resolve_dtype(config: ModelConfig, device: torch.device) -> Literal["float32", "bfloat16"]:
    """Resolve ``compute_dtype: auto``; flash attention needs bfloat16."""
    if config.compute_dtype != "auto":
        return config.compute_dtype
    return "bfloat16" if config.attention == "flash_attention_2" or has_bfloat16(device) else "float32"


def emulated_dtype(model: ModelConfig, device: torch.device) -> Problem | None:
    """A warning if the processor emulates the compute dtype.

    On an Intel Xeon without bfloat16 instructions an update of a 135M model takes three times as long in bfloat16.
    """
    if model.compute_dtype != "bfloat16" or device.type != "cpu" or not hasattr(torch.cpu, "get_capabilities"):
        return None
    if torch.cpu.get_capabilities().get("architecture") != "x86_64" or has_bfloat16(device):
        return None
    reason = "is emulated: this processor has no bfloat16 instructions"
    fix = "model.compute_dtype=float32 is several times faster"
    return Problem("emulated-dtype", "model.compute_dtype", model.compute_dtype, reason, fix)


def is_out_of_memory(error: Exception) -> bool:
    """A CPU's allocator raises a plain RuntimeError."""
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "DefaultCPUAllocator" in str(error)


def _npu_count() -> int:
    """NPUs that PyTorch sees; it sees none without torch_npu."""
    if importlib.util.find_spec("torch_npu") is None:
        return 0
    importlib.import_module("torch_npu")
    npu: Any = torch.npu  # type: ignore[attr-defined]  # torch_npu puts it there
    return int(npu.device_count())
