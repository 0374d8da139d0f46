"""Objects of the user's own that a configuration names: ``package.module:name``, or ``FILE.py:name``.

A file is named with a fingerprint, ``/absolute/FILE.py:name@0123456789abcdef``: a resumed run and every worker process
notice another content.  Only configurations and options name such objects; data files cannot.
"""

import importlib
import importlib.util
import re
import sys
import traceback
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from coca_mindspeed.errors import ConfigError, did_you_mean
from coca_mindspeed.utils.files import file_sha256

_REFERENCE = re.compile(r"(?P<place>[^:]+):(?P<name>[A-Za-z_]\w*)(?:@(?P<digest>[0-9a-f]{16}))?")
_HOW = "expected package.module:name or FILE.py:name"


def is_custom(name: str) -> bool:
    """Whether ``name`` names an object of the user's own; this package's names have no colon."""
    return ":" in name


def pinned(name: str, beside: Path | None = None) -> str:
    """The name with the file's absolute path and fingerprint; unchanged if it has them, or names a module.

    A relative path starts at the working directory, or at ``beside`` if it is not there.  Raises ValueError if it is no
    such name, or there is no such file.
    """
    place, attribute, digest = _parts(name)
    if digest or not place.endswith(".py"):
        return name
    folders = [Path(), *([] if beside is None else [beside])]
    file = next((path for folder in folders if (path := folder / Path(place).expanduser()).is_file()), None)
    if file is None:
        raise ValueError(f"no file {Path(place).absolute()}; {_HOW}")
    return f"{file.absolute().resolve()}:{attribute}@{_fingerprint(file)}"


@cache
def load_custom(name: str) -> Any:
    """Import what :func:`pinned` named; ConfigError if it has changed, cannot be imported, or lacks the object."""
    place, attribute, digest = _parts(name)
    try:
        module = _import_file(Path(place), digest) if place.endswith(".py") else importlib.import_module(place)
    except ConfigError:
        raise
    except Exception as error:  # the module is the user's own code
        hint = f"; for a file, name ./{place.replace('.', '/')}.py:{attribute}" if digest is None else ""
        raise ConfigError(f"{name}: cannot be imported: {_failure(error, place)}{hint}") from error
    if not hasattr(module, attribute):
        raise ConfigError(f"{name}: {place} has no {attribute!r}{did_you_mean(attribute, dir(module))}")
    return getattr(module, attribute)


def _parts(name: str) -> tuple[str, str, str | None]:
    if (match := _REFERENCE.fullmatch(name)) is None:
        raise ValueError(f"{_HOW}, found {name!r}")
    return match["place"], match["name"], match["digest"]


def _fingerprint(file: Path) -> str:
    return file_sha256(file)[:16]


def _import_file(file: Path, digest: str | None) -> ModuleType:
    if not file.is_file():
        raise ConfigError(f"{file}: no such file; on a cluster, it must be at the same path on every node")
    if (found := _fingerprint(file)) != digest:
        raise ConfigError(
            f"{file}: has changed since the run was started (SHA-256 {found}, expected {digest}); restore it, or start "
            "a new run"
        )
    name = f"coca_mindspeed_own_{digest}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # dataclasses look their module up
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]


def _failure(error: Exception, place: str) -> str:
    """The error with its line in the user's file, if it was raised there."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == place]
    return f"{type(error).__name__}: {error}{f' (line {lines[-1]})' if lines else ''}"
