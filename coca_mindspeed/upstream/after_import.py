"""Patch a module when it is imported, without importing it early: MindSpeed must patch Megatron first."""

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

_callbacks: dict[str, Callable[[Any], None]] = {}


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        callback = _callbacks.pop(fullname, None)  # once; and so the search below does not end here again
        if callback is None:
            return None
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: types.ModuleType) -> None:
            execute(module)
            callback(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def after_import(name: str, callback: Callable[[Any], None]) -> None:
    """Call ``callback`` with the module ``name`` when it is imported, or now if it already is."""
    if name in sys.modules:
        callback(sys.modules[name])
        return
    _callbacks[name] = callback
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
