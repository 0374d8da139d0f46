"""verl's idea of an accelerator, answered by a CPU: it has memory to spare and nothing to wait for."""

import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from verl.plugin.platform.platform_base import PlatformBase

_FREE, _TOTAL = 8 * 2**30, 16 * 2**30  # bytes, for whoever plans by them


class _Device(types.ModuleType):
    """Stands where ``torch.cuda`` would."""

    def __getattr__(self, name: str) -> Any:
        if name in _ZERO:
            return lambda *_arguments, **_options: 0
        if name in _NOTHING:
            return lambda *_arguments, **_options: None
        return getattr(torch.cpu, name)

    @staticmethod
    def is_available() -> bool:
        return False

    @staticmethod
    def mem_get_info(_device: Any = None) -> tuple[int, int]:
        return _FREE, _TOTAL

    @staticmethod
    def get_device_name(_device: Any = None) -> str:
        return "CPU"

    @staticmethod
    def get_rng_state(_device: Any = None) -> torch.Tensor:
        return torch.get_rng_state()

    @staticmethod
    def set_rng_state(state: torch.Tensor, _device: Any = None) -> None:
        torch.set_rng_state(state)


_ZERO = ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved")
_NOTHING = ("empty_cache", "set_device", "synchronize", "reset_peak_memory_stats", "manual_seed", "manual_seed_all")
_NOTHING += ("ipc_collect",)


class CpuPlatform(PlatformBase):
    """The platform; each method is one of verl's."""

    device_name = "cpu"
    vendor_name = "host"
    device_module = _Device("coca_host_device")

    def is_available(self) -> bool:
        return True

    def current_device(self) -> str:
        return "cpu"

    def device_count(self) -> int:
        return 1

    def _nothing(self, *_arguments: Any, **_options: Any) -> None:
        """There is one device, whose allocator is the system's; nothing is cached or runs behind our back."""

    set_device = synchronize = set_allocator_settings = empty_cache = profiler_start = profiler_stop = _nothing

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def ray_resource_name(self) -> str:
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> None:
        return None
