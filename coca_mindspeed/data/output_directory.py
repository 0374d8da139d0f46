"""A directory that is whole or absent: built under another name beside its place, then renamed into it."""

import fcntl
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from coca_mindspeed.errors import DataError
from coca_mindspeed.files import fsync_directory

MARKER = "report.json"  # what every finished directory of ours holds; only such a one is ever replaced
_LOCK = ".lock"


@contextmanager
def output_directory(path: Path, overwrite: bool) -> Iterator[Path]:
    """Yield a temporary directory that becomes ``path`` if the block succeeds and vanishes if it fails.

    A killed process leaves only its temporary directory (``.NAME.partial-*``), which the next run removes.

    Args:
        path: the final place; it may exist if it is empty, or with ``overwrite`` if it is an earlier output.
        overwrite: replace an earlier output.

    Raises:
        DataError: the place is taken.
    """
    _check_free(path, overwrite)
    path.parent.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(path)
    temporary = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}.partial-"))
    try:
        with (temporary / _LOCK).open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield temporary
            (temporary / _LOCK).unlink()
            _check_free(path, overwrite)
            _replace(path, temporary)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _check_free(path: Path, overwrite: bool) -> None:
    if not path.exists():
        return
    if not path.is_dir():
        raise DataError(f"{path}: is a file; the output is a directory")
    if any(path.iterdir()) and not overwrite:
        raise DataError(f"{path}: already exists; choose another --output, or replace it with --overwrite")
    if any(path.iterdir()) and not (path / MARKER).is_file():
        raise DataError(f"{path}: holds no {MARKER}, so it is not an earlier output and is not replaced")


def _replace(path: Path, temporary: Path) -> None:
    temporary.chmod(0o755)
    fsync_directory(temporary)
    if path.exists():
        # Two renames: a crash between them leaves the earlier output whole, under the name it was moved to.
        earlier = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}.earlier-"))
        path.rename(earlier)
        try:
            temporary.rename(path)
        except BaseException:
            earlier.rename(path)
            raise
        shutil.rmtree(earlier)
    else:
        temporary.rename(path)
    fsync_directory(path.parent)


def _remove_abandoned(path: Path) -> None:
    """Remove temporary directories whose process is gone: nobody holds their lock."""
    for directory in path.parent.glob(f".{path.name}.partial-*"):
        try:
            with (directory / _LOCK).open("r+") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(directory)
        except FileNotFoundError:  # another process is about to lock it, or has just finished
            continue
        except BlockingIOError:  # another process is at work in it
            continue
