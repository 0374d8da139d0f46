"""Stubs of packages that need an NPU, so that MindSpeed-RL can be imported without one.

A stub provides names: base classes, decorators, constants.  Calling one raises an error that names it.
"""

import importlib
import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Sequence
from typing import Any

from coca_mindspeed.errors import MissingDependencyError

#: Top-level packages that stubs replace if they are not installed.
PACKAGES = ("torch_npu", "acl", "vllm", "vllm_ascend", "torchair", "torchvision", "av", "qwen_vl_utils", "mathruler")
#: Objects that imports need, by dotted name; other modules of the shim add to it.
ANSWERS: dict[str, Any] = {
    "torch_npu.utils.collect_env.get_cann_version": lambda: "8.3.RC1",
    # Options of a process group; without the attribute hccl_config there is nothing to set.
    "torch_npu._C._distributed_c10d.ProcessGroupHCCL.Options": type("Options", (), {}),
    # A decorator that registers something with the NPU's graph compiler.
    "torchair.register_fx_node_ge_converter": lambda *_args, **_kwargs: lambda decorated: decorated,
}


class _StubType(type):
    """An attribute of a stub is a stub; calling a stub is an error."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _look_up(f"{cls.__module__}.{cls.__qualname__}.{name}")

    def __call__(cls, *_args: Any, **_kwargs: Any) -> Any:
        if cls.__dict__.get("_is_stub"):
            raise MissingDependencyError(
                f"{cls.__module__}.{cls.__qualname__} was called on platform host, which has a stub for it; it needs "
                "an Ascend NPU and its software (platform: npu)"
            )
        return super().__call__(*_args, **_kwargs)

    def __or__(cls, other: Any) -> Any:
        return object

    __ror__ = __or__


def stub(dotted: str) -> Any:
    """A class called ``dotted``: it can be imported, subclassed and named in a type, but not called."""
    module, _, name = dotted.rpartition(".")
    return _StubType(name, (), {"__module__": module, "__qualname__": name, "_is_stub": True})


def _look_up(dotted: str) -> Any:
    return ANSWERS[dotted] if dotted in ANSWERS else stub(dotted)


class _StubModule(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = _look_up(f"{self.__name__}.{name}")
        setattr(self, name, value)
        return value

    def __reduce__(self) -> Any:
        return importlib.import_module, (self.__name__,)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds stubs of some packages; at the end of ``sys.meta_path``, only of those that are not installed."""

    def __init__(self, packages: Sequence[str]) -> None:
        self._packages = packages

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] not in self._packages:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = _StubModule(spec.name)
        module.__path__ = []  # a package: anything may be imported from below it
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        module.__version__ = "0.0+stub"  # type: ignore[attr-defined]
        module.__file__ = __file__  # op builders look for headers beside it, and find none


def install(hiding: Sequence[str] = ()) -> None:
    """Let imports find stubs of :data:`PACKAGES` that are not installed, and of ``hiding``.  Idempotent."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder(PACKAGES))
        if hiding:
            sys.meta_path.insert(0, _Finder(hiding))
