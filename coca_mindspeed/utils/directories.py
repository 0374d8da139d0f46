"""Output directories: markers and locks, results that are complete or absent, and results computed in parts."""

import difflib
import fcntl
import json
import os
import shutil
import struct
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, TypeVar

from coca_mindspeed.errors import ConfigError, DataError
from coca_mindspeed.utils.files import fsync_directory, put_in_place
from coca_mindspeed.utils.json_files import read_json_lines, read_object, write_json, write_json_lines
from coca_mindspeed.utils.progress import StepProgress
from coca_mindspeed.utils.text_formats import first_difference

MARKER = "coca-mindspeed.json"
LOCK = ".lock"
PROGRESS = "progress.json"  # in a run's directory: how far the phase before the first step is
_MAKER = "coca-mindspeed"
_MOST_RUNS = 5  # in a message


def write_marker(directory: Path, kind: str, fields: Mapping[str, Any] | None = None) -> None:
    """Mark ``directory`` (created if missing) as ours; ``kind`` is ``run``, ``data`` or ``model``."""
    write_json(directory / MARKER, {"made_by": _MAKER, "kind": kind, **(fields or {})})


def read_marker(directory: Path, kind: str) -> dict[str, Any] | None:
    """Return the marker of a directory of ours of this kind, else None."""
    try:
        content = json.loads((directory / MARKER).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    ours = isinstance(content, dict) and content.get("made_by") == _MAKER and content.get("kind") == kind
    return content if ours else None


def is_ours(directory: Path, kind: str) -> bool:
    """Whether ``directory`` is one of ours, of this kind."""
    return read_marker(directory, kind) is not None


def run_of_model(model: Path) -> Path | None:
    """The run of a model ``RUN/model``, ``RUN/best_model`` or ``RUN/checkpoints/STEP/model``; None for any other."""
    of_checkpoint = model.name == "model" and model.parent.parent.name == "checkpoints"
    run = model.parent.parent.parent if of_checkpoint else model.parent
    return run if model.name in ("model", "best_model") and is_ours(run, "run") else None


def nearby_runs(directory: Path, is_run: Callable[[Path], bool]) -> str:
    """Return ``; runs nearby: A, B`` for the runs in and beside ``directory``, the most similar first, or nothing."""
    places = [place for place in (directory, directory.parent) if place.is_dir()]
    runs = {str(path) for place in places for path in place.iterdir() if path.is_dir() and is_run(path)}
    similar = difflib.get_close_matches(str(directory), sorted(runs), n=_MOST_RUNS, cutoff=0.0)
    return f"; runs nearby: {', '.join(similar)}" if similar else ""


def is_free(directory: Path) -> bool:
    """Whether the path does not exist or is an empty directory."""
    return not directory.exists() or (directory.is_dir() and not any(directory.iterdir()))


def remove_entries(directory: Path, kind: str, names: Iterable[str]) -> None:
    """Remove entries of a directory of ours and its marker, which goes last; ConfigError if it is not ours."""
    if not is_ours(directory, kind):
        raise ConfigError(f"{directory}: holds no {MARKER} of kind {kind}, so nothing in it is removed")
    for name in [*names, MARKER]:
        path = directory / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    fsync_directory(directory)


def lock_of_process(path: Path) -> IO[bytes] | None:
    """Lock ``path`` until the file is closed or the process ends; return the open file, or None if it is locked.

    A POSIX record lock is not inherited by worker processes, so those that outlive a killed parent hold nothing.
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


def is_running(directory: Path) -> bool | None:
    """Whether another process holds the lock of a run's directory; None: it has none, or that cannot be told."""
    if sys.platform != "linux":  # the order of the fields differs
        return None
    lock = struct.pack("hhqqi", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)  # struct flock; unlike a lock, it blocks no start
    try:
        with (directory / LOCK).open("rb") as file:
            kind, *_ = struct.unpack("hhqqi", fcntl.fcntl(file, fcntl.F_GETLK, lock))
    except OSError:
        return None
    return bool(kind != fcntl.F_UNLCK)


def check_output_path(path: Path, overwrite: bool) -> None:
    """Raise DataError if an output directory cannot be created, or is taken; write nothing."""
    _check_not_taken(path, overwrite)
    # It is built next to its final path, so the parent's permissions count.
    parent = nearest_directory(path.absolute().parent)
    if not parent.is_dir():
        raise DataError(f"{path}: cannot be created: {parent} is a file")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise DataError(f"{path}: cannot be created: {parent} is not writable")


def _check_not_taken(path: Path, overwrite: bool, kind: str | None = None) -> None:
    if path.exists() and not path.is_dir():
        raise DataError(f"{path}: is a file; the output is a directory")
    if is_free(path):
        return
    if not overwrite:
        raise DataError(f"{path}: already exists; choose another output, or replace it with --overwrite")
    if kind is not None and not is_ours(path, kind):
        raise DataError(f"{path}: holds no {MARKER} of kind {kind}, so it is not an earlier output and is not replaced")


@contextmanager
def output_directory(path: Path, overwrite: bool, kind: str = "data") -> Iterator[Path]:
    """Yield a directory, marked as ours, that becomes ``path`` if the block succeeds, and is removed if it fails.

    A killed process leaves it as ``.NAME.partial-*``.  Killed between the two renames of a replacement, it leaves the
    earlier output as ``.NAME.earlier-*``, which the next run restores.  Raises DataError: ``path`` is not empty, and is
    no earlier output of this kind that ``overwrite`` replaces.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    for earlier in path.parent.glob(f".{path.name}.earlier-*"):
        if is_ours(earlier, kind) and is_free(path):
            earlier.rename(path)
    _check_not_taken(path, overwrite, kind)
    temporary = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}.partial-"))
    try:
        write_marker(temporary, kind)
        yield temporary
        _check_not_taken(path, overwrite, kind)
        temporary.chmod(0o755)
        put_in_place(temporary, path, temporary.with_name(temporary.name.replace(".partial-", ".earlier-")))
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


@contextmanager
def lock_run(path: Path) -> Iterator[None]:
    """Lock a run's directory, left as it was found if nothing is written into it; ConfigError if it is locked."""
    made = [directory for directory in (path, *path.parents) if not directory.exists()]
    path.mkdir(parents=True, exist_ok=True)
    before = {entry.name for entry in path.iterdir()}
    lock = lock_of_process(path / LOCK)
    if lock is None:
        raise ConfigError(f"--output {path}: another process is running in this directory")
    with lock:
        try:
            yield
        finally:
            if {entry.name for entry in path.iterdir()} - before == {LOCK}:
                (path / LOCK).unlink()
                with suppress(OSError):  # not empty
                    for directory in made:
                        directory.rmdir()


def nearest_directory(path: Path) -> Path:
    """``path``, or the first directory above it that exists."""
    return next(each for each in (path, *path.absolute().parents) if each.exists())


def check_writable(path: Path) -> None:
    """Raise ConfigError if files cannot be written under ``path``, which need not exist and is not made."""
    try:
        with tempfile.TemporaryFile(dir=nearest_directory(path)) as probe:
            probe.write(b"coca")
    except OSError as error:
        raise ConfigError(f"--output {path}: cannot be written: {error.strerror}") from error


_Item = TypeVar("_Item")
Rows = Sequence[Mapping[str, Any]]


def resumable_map(
    directory: Path,
    items: Sequence[_Item],
    size: int,
    work: Callable[[int, Sequence[_Item]], Rows],
    *,
    title: str,
    show_progress: bool = True,
) -> list[dict[str, Any]]:
    """Run ``work(part number, items of the part)`` on the parts that ``directory`` lacks; return all rows in order.

    ``work`` returns a JSON row for each item.  It must draw its random numbers from the part's number alone, so that a
    resumed run gives the same result.  Raises ConfigError if an existing part has another number of rows than items.
    """
    rows: list[dict[str, Any]] = []
    with StepProgress(-(-len(items) // size), show_progress, title=title) as progress:
        for number, start in enumerate(range(0, len(items), size)):
            path = directory / f"part_{number:06d}.jsonl"
            chunk = items[start : start + size]
            if not path.exists():
                write_json_lines(path, work(number, chunk))
            found = [row for _, row in read_json_lines(path)]
            if len(found) != len(chunk):
                raise ConfigError(
                    f"{path}: holds {len(found)} results, and the part has {len(chunk)}; it is of other work"
                )
            rows += found
            progress.show(number + 1, f"{len(rows)} of {len(items)}")
    return rows


def check_directory(directory: Path, settings: Mapping[str, Any]) -> bool:
    """Whether ``directory`` holds results of these settings; ConfigError if it holds other results or files."""
    path = directory / "settings.json"
    if path.exists():
        before = read_object(path)
        if (found := first_difference(before, settings)) is not None:
            name, then, now = found
            raise ConfigError(
                f"--output {directory}: holds results with {name}={then!r}, found {now!r}; choose another directory or "
                "the same settings"
            )
        return True
    if directory.exists() and not directory.is_dir():
        raise ConfigError(f"--output {directory}: is a file; the results need a directory")
    if directory.exists() and any(entry.name != LOCK for entry in directory.iterdir()):
        raise ConfigError(f"--output {directory}: is not empty and has no settings.json; choose another directory")
    return False


def claim_directory(directory: Path, settings: Mapping[str, Any]) -> None:
    """Write the settings into ``directory`` after :func:`check_directory`; ConfigError if it cannot be written."""
    if not check_directory(directory, settings):
        try:
            write_json(directory / "settings.json", settings)
        except OSError as error:
            raise ConfigError(f"--output {directory}: cannot be written: {error.strerror}") from error
