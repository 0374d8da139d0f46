"""``cuda`` and ``npu`` mean "the device of this machine": the CPU, or a CUDA GPU where there is one.

MindSpeed-RL, MindSpeed and Megatron name devices as ``cuda`` and ``npu``.  With a GPU only ``npu`` has to be
translated; without one, both become the CPU, and the calls of ``torch.cuda`` that they make answer for a CPU.
"""

import collections
import contextlib
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_installed: "_DeviceNames | None" = None


class _DeviceNames(TorchFunctionMode):
    """Translates device arguments of every torch call on this thread."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device
        self._foreign = {"npu"} if device.type == "cuda" else {"npu", "cuda"}

    def _translate(self, value: Any) -> Any:
        if isinstance(value, str) and value.partition(":")[0] in self._foreign:
            return self.device
        if isinstance(value, torch.device) and value.type in self._foreign:
            return self.device
        return value

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if self.device.type == "cpu":
            if func in (torch.Tensor.cuda, torch.Tensor.pin_memory):
                return args[0]
            if func is torch.Tensor.type and len(args) == 1 and not kwargs:
                # Megatron tells parameters apart by type names such as torch.cuda.FloatTensor.
                return func(*args).replace("torch.", "torch.cuda.")
        # Only the device, which is a keyword or a leading argument, is looked at: this runs for every torch call.
        if "device" in kwargs:
            kwargs = {**kwargs, "device": self._translate(kwargs["device"])}
        elif func is torch.Tensor.to and len(args) > 1:
            args = (args[0], self._translate(args[1]), *args[2:])
        return func(*args, **kwargs)


class _Stream:
    """A stream of a device that has none: everything on it has already happened."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        pass

    def wait(self, _other: Any = None) -> None: ...

    wait_stream = wait_event = synchronize = record = wait

    def record_event(self, _event: Any = None) -> "_Stream":
        return self

    def query(self) -> bool:
        return True

    def elapsed_time(self, _other: Any) -> float:
        return 0.0


def _nothing(*_args: Any, **_kwargs: Any) -> None:
    """For calls that only matter on a device."""


def _zero(*_args: Any, **_kwargs: Any) -> int:
    return 0


@contextlib.contextmanager
def _no_context(*_args: Any, **_kwargs: Any) -> Iterator[None]:
    yield


_NOTHING = ("set_device", "init", "_lazy_init", "synchronize", "empty_cache", "manual_seed", "manual_seed_all")
_NOTHING += ("ipc_collect", "reset_peak_memory_stats", "set_stream", "set_compile_mode")
_MEMORY = ("allocated", "reserved", "cached")


def _answers_of_a_cpu() -> dict[str, Any]:
    """What ``torch.cuda`` and ``torch.npu`` answer where the device is the CPU."""
    cpu = torch.device("cpu")
    stream = _Stream()
    properties = types.SimpleNamespace(name="host", total_memory=2**40, major=0, minor=0, multi_processor_count=1)
    return {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "is_bf16_supported": lambda *_a, **_k: True,
        "device_count": lambda: 1,
        "current_device": lambda: cpu,
        "get_device_name": lambda *_a: "host",
        "get_device_capability": lambda *_a: (0, 0),
        "get_device_properties": lambda *_a: properties,
        "get_rng_state": lambda *_a, **_k: torch.get_rng_state(),
        "set_rng_state": lambda state, *_a, **_k: torch.set_rng_state(state),
        "current_stream": lambda *_a, **_k: stream,
        "default_stream": lambda *_a, **_k: stream,
        "stream": _no_context,
        "device": _no_context,
        "Stream": _Stream,
        "Event": _Stream,
        **dict.fromkeys(_NOTHING, _nothing),
        **dict.fromkeys((f"{most}memory_{kind}" for most in ("", "max_") for kind in _MEMORY), _zero),
        "memory_stats": lambda *_a, **_k: {},
        "mem_get_info": lambda *_a, **_k: (2**40, 2**40),
        "_lazy_call": lambda call, **_k: call(),
        # Indexed by whatever current_device answers.
        "default_generators": collections.defaultdict(lambda: torch.default_generator),
    }


def host_device() -> torch.device:
    """The GPU if there is one, else the CPU."""
    if _installed is not None:
        return _installed.device
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def install() -> torch.device:
    """Translate device names from now on, on this thread; returns the device that they mean.  Idempotent."""
    global _installed
    if _installed is not None:
        return _installed.device
    import torch._dynamo  # it registers every function of torch.cuda once, as they were

    device = host_device()
    npu = types.ModuleType("torch.npu")
    answers = _answers_of_a_cpu()
    if device.type == "cpu":
        for module in (torch.cuda, torch.cuda.random, torch.cuda.memory):
            for name, value in answers.items():
                if module is torch.cuda or hasattr(module, name):
                    setattr(module, name, value)
        # Constructors of the form torch.cuda.LongTensor(...).
        for kind in ("Float", "Double", "Half", "BFloat16", "Long", "Int", "Byte", "Bool"):
            setattr(torch.cuda, f"{kind}Tensor", getattr(torch, f"{kind}Tensor"))
    for name, value in answers.items():
        setattr(npu, name, value if device.type == "cpu" else getattr(torch.cuda, name, value))
    npu.mstx = types.SimpleNamespace(range_start=_zero, range_end=_nothing)  # type: ignore[attr-defined]
    torch.npu = npu  # type: ignore[attr-defined]
    torch.Tensor.npu = (  # type: ignore[attr-defined]
        (lambda tensor, *_a, **_k: tensor) if device.type == "cpu" else torch.Tensor.cuda
    )
    torch.nn.Module.npu = torch.nn.Module.cuda  # type: ignore[attr-defined]
    _installed = _DeviceNames(device)
    _installed.__enter__()
    return device


def use_backend_of(device: torch.device) -> None:
    """Let ``nccl`` and ``hccl`` mean the collective backend of ``device``: gloo on a CPU."""
    if device.type != "cpu":
        return
    original_init, original_group = torch.distributed.init_process_group, torch.distributed.new_group

    def init_process_group(backend: str | None = None, *args: Any, **kwargs: Any) -> Any:
        return original_init("gloo", *args, **kwargs)

    def new_group(ranks: Any = None, timeout: Any = None, backend: str | None = None, **kwargs: Any) -> Any:
        kwargs.pop("pg_options", None)
        return original_group(ranks, timeout, "gloo", **kwargs)

    torch.distributed.init_process_group = init_process_group
    torch.distributed.new_group = new_group  # type: ignore[assignment]  # it takes fewer of the same arguments
