"""Which directories are ours to replace or remove: only those that hold our marker, which is looked into, not at.

A directory of a run, of prepared data or of an imported model holds ``coca-mindspeed.json``, which says who made it and
what it is.  No name that others use as well (``config.yaml``, ``report.json``) allows anything to be removed.
"""

import fcntl
import json
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, Any

from coca_mindspeed.errors import ConfigError
from coca_mindspeed.files import fsync_directory, write_json

MARKER = "coca-mindspeed.json"
_MAKER = "coca-mindspeed"


def write_marker(directory: Path, kind: str, fields: Mapping[str, Any] | None = None) -> None:
    """Make ``directory`` ours.

    Args:
        directory: it is made if it is not there.
        kind: what it is: ``run``, ``data`` or ``model``.
        fields: what else the marker says about it.
    """
    write_json(directory / MARKER, {"made_by": _MAKER, "kind": kind, **(fields or {})})


def read_marker(directory: Path, kind: str) -> dict[str, Any] | None:
    """The marker of a directory of this kind; None where it is not one of ours."""
    try:
        content = json.loads((directory / MARKER).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    ours = isinstance(content, dict) and content.get("made_by") == _MAKER and content.get("kind") == kind
    return content if ours else None


def is_ours(directory: Path, kind: str) -> bool:
    """Whether ``directory`` is one of ours, of this kind."""
    return read_marker(directory, kind) is not None


def is_free(directory: Path) -> bool:
    """Whether nothing is there, or an empty directory."""
    return not directory.exists() or (directory.is_dir() and not any(directory.iterdir()))


def remove_entries(directory: Path, kind: str, names: Iterable[str]) -> None:
    """Remove what we wrote into a directory of ours, and nothing else that stands there.

    The marker goes last, so a kill in between leaves a directory that is still ours.

    Args:
        directory: one of ours.
        kind: what it is.
        names: of everything that we write there.

    Raises:
        ConfigError: it is not ours; nothing is removed.
    """
    if not is_ours(directory, kind):
        raise ConfigError(f"{directory}: holds no {MARKER} of a {kind} of ours, so nothing in it is removed")
    for name in [*names, MARKER]:
        path = directory / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    fsync_directory(directory)


def lock_of_process(path: Path) -> IO[bytes] | None:
    """Hold ``path`` for this process until the file is closed or the process ends, however it ends.

    A POSIX record lock: worker processes do not inherit it, so those that outlive a killed parent hold nothing.

    Returns:
        The open file, or None if another process holds it.
    """
    file = path.open("ab")
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        file.close()
        return None
    except OSError:  # a file system without locks; some clusters mount theirs so
        return file
    return file
