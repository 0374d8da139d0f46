"""AdamW for the trained parameters: PyTorch's, or bitsandbytes' with 8-bit moments."""

import importlib
from importlib.metadata import version
from typing import Any

import torch
from packaging.version import Version

from coca_mindspeed.config.schema import OptimizerConfig
from coca_mindspeed.errors import ConfigError
from coca_mindspeed.local.policy import Policy
from coca_mindspeed.utils.packages import require

_OLDEST = Version("0.50")  # the oldest tested on a CPU
_DEVICES = ("cpu", "cuda")
_SMALLEST = 4096  # bitsandbytes': smaller tensors have 32-bit moments


def require_optimizer(config: OptimizerConfig, device: torch.device) -> None:
    """Raise ConfigError if bitsandbytes is needed and missing, too old, or does not support the device."""
    if config.name == "adamw":
        return
    where = f"optimizer.name={config.name}"
    if device.type not in _DEVICES:
        raise ConfigError(f"{where}: bitsandbytes computes on {' and '.join(_DEVICES)}, not {device.type}; use adamw")
    require("bitsandbytes", purpose=where)
    found = version("bitsandbytes")
    if Version(found) < _OLDEST:
        raise ConfigError(
            f"{where}: needs bitsandbytes {_OLDEST} or newer, found {found} (pip install '.[adamw-8bit]')"
        )


def build_optimizer(policy: Policy, config: OptimizerConfig) -> torch.optim.Optimizer:
    settings: dict[str, Any] = {
        "lr": config.lr,
        "betas": config.betas,
        "eps": config.eps,
        "weight_decay": config.weight_decay,
    }
    if config.name == "adamw_8bit":
        return _build_8_bit(policy, settings)
    fused = policy.device.type in ("cpu", "cuda") or None  # one kernel for all parameters
    return torch.optim.AdamW(policy.trained_parameters(), fused=fused, **settings)


def _build_8_bit(policy: Policy, settings: dict[str, Any]) -> torch.optim.Optimizer:
    bitsandbytes: Any = importlib.import_module("bitsandbytes")

    class AdamW(bitsandbytes.optim.AdamW):
        """Each group sets the bits of its moments; the library's own setting is global."""

        def get_config(self, gindex: int, pindex: int, group: dict[str, Any]) -> dict[str, Any]:
            return {**super().get_config(gindex, pindex, group), "optim_bits": group["optim_bits"]}

    sizes: dict[int, list[torch.nn.Parameter]] = {}
    for parameter in policy.trained_parameters():
        sizes.setdefault(_bits(policy, parameter), []).append(parameter)
    groups = [{"params": parameters, "optim_bits": bits} for bits, parameters in sizes.items()]
    optimizer: torch.optim.Optimizer = AdamW(groups, optim_bits=8, **settings)
    return optimizer


def _bits(policy: Policy, parameter: torch.nn.Parameter) -> int:
    """Bits of a parameter's moments.

    Most rows of an embedding have no gradient in a step: where a second moment is rounded to 0, the rest of the first
    moment would be divided by eps alone.
    """
    embedding = policy.model.get_input_embeddings().weight
    return 32 if parameter is embedding or parameter.numel() < _SMALLEST else 8
