"""Whether an output can be made, asked before the work and not after."""

import os
from pathlib import Path

from coca_mindspeed.errors import DataError
from coca_mindspeed.ownership import is_free


def check_place(path: Path, overwrite: bool) -> None:
    """Refuse an output directory that could not be made; nothing is written.

    Raises:
        DataError: it is there and holds something, or a parent is a file or may not be written to.
    """
    check_not_taken(path, overwrite)
    # It is built beside its place, so the parent's permissions count.
    parent = next(parent for parent in path.absolute().parents if parent.exists())
    if not parent.is_dir():
        raise DataError(f"{path}: cannot be made: {parent} is a file")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise DataError(f"{path}: cannot be made: {parent} may not be written to")


def check_not_taken(path: Path, overwrite: bool) -> None:
    """Refuse a file, and without ``overwrite`` a directory that holds something.

    Raises:
        DataError: it is one of these.
    """
    if path.exists() and not path.is_dir():
        raise DataError(f"{path}: is a file; the output is a directory")
    if not is_free(path) and not overwrite:
        raise DataError(f"{path}: already exists; choose another output, or replace it with --overwrite")
