"""Atomic output directories."""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from coca_mindspeed.errors import DataError
from coca_mindspeed.utils.files import MARKER, is_free, is_ours, put_in_place, write_marker


def check_output_path(path: Path, overwrite: bool) -> None:
    """Check that an output directory can be created, without writing.

    Raises DataError if it is not empty, or a parent is a file or not writable.
    """
    check_not_taken(path, overwrite)
    # It is built next to its final path, so the parent's permissions count.
    parent = next(parent for parent in path.absolute().parents if parent.exists())
    if not parent.is_dir():
        raise DataError(f"{path}: cannot be created: {parent} is a file")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise DataError(f"{path}: cannot be created: {parent} is not writable")


def check_not_taken(path: Path, overwrite: bool) -> None:
    """Raise DataError for a file, and without ``overwrite`` for a directory that is not empty."""
    if path.exists() and not path.is_dir():
        raise DataError(f"{path}: is a file; the output is a directory")
    if not is_free(path) and not overwrite:
        raise DataError(f"{path}: already exists; choose another output, or replace it with --overwrite")


@contextmanager
def output_directory(path: Path, overwrite: bool, kind: str = "data") -> Iterator[Path]:
    """Yield a temporary directory that becomes ``path`` if the block succeeds, and is removed if it fails.

    The directory holds our marker (see :mod:`coca_mindspeed.utils.files`), which its process keeps locked.  A killed
    process leaves its temporary directory (``.NAME.partial-*``) and, between the two renames of a replacement, the
    earlier output (``.NAME.earlier-*``); the next run restores the second and removes the first.

    Raises:
        DataError: ``path`` is not empty, and is no earlier output of this kind that ``overwrite`` replaces.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    _restore_or_remove_abandoned(path, kind)
    _check_free(path, overwrite, kind)
    temporary = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}.partial-"))
    try:
        write_marker(temporary, kind)
        with (temporary / MARKER).open("rb") as marker:
            fcntl.flock(marker, fcntl.LOCK_EX)
            yield temporary
            _check_free(path, overwrite, kind)
            _replace(path, temporary)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _check_free(path: Path, overwrite: bool, kind: str) -> None:
    check_not_taken(path, overwrite)
    if not is_free(path) and not is_ours(path, kind):
        raise DataError(f"{path}: holds no {MARKER} of kind {kind}, so it is not an earlier output and is not replaced")


def _replace(path: Path, temporary: Path) -> None:
    temporary.chmod(0o755)
    earlier = temporary.with_name(f".{path.name}.earlier-{temporary.name.rpartition('-')[2]}")
    with ExitStack() as stack:
        if not is_free(path):
            marker = stack.enter_context((path / MARKER).open("rb"))
            fcntl.flock(marker, fcntl.LOCK_EX)  # marks a replacement between its two renames
        put_in_place(temporary, path, earlier)


def _restore_or_remove_abandoned(path: Path, kind: str) -> None:
    """Clean up after killed processes, whose locks are free."""
    for earlier in sorted(path.parent.glob(f".{path.name}.earlier-*")):
        with _abandoned(earlier, kind) as abandoned:
            if abandoned and is_free(path):
                earlier.rename(path)
            elif abandoned:
                shutil.rmtree(earlier)
    for partial in path.parent.glob(f".{path.name}.partial-*"):
        with _abandoned(partial, kind) as abandoned:
            if abandoned:
                shutil.rmtree(partial)


@contextmanager
def _abandoned(directory: Path, kind: str) -> Iterator[bool]:
    """Lock a directory and yield whether it is ours and was not in use."""
    with ExitStack() as stack:
        try:
            marker = stack.enter_context((directory / MARKER).open("rb"))
            fcntl.flock(marker, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # no marker, gone, not marked yet, or locked
            yield False
        else:
            yield is_ours(directory, kind)
