"""Atomic files and directories, JSON Lines with errors that name the line, markers of our directories, hub ids."""

import difflib
import fcntl
import hashlib
import json
import math
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from coca_mindspeed.errors import ConfigError, DataError
from coca_mindspeed.utils.text_formats import JsonError, line_bound, numbered_lines, parse_json

# Half of a UTF-16 pair: JSON can name one (\ud83d), UTF-8 cannot hold one.
LONE_SURROGATE = re.compile("[\ud800-\udfff]")
_HUB_ID = re.compile(r"(?!models/)[\w-]+/[\w.-]+(:[\w.-]*){0,2}", re.ASCII)
_DATA_FILE = re.compile(r".*\.(jsonl?|ndjson|csv|tsv|parquet|arrow|gz)", re.IGNORECASE)


def is_hub_id(text: str) -> bool:
    """Whether a text names a model or a data set of the hub (ORG/NAME, [:CONFIGURATION[:SPLIT]]), and no path here."""
    path = Path(text)
    return not (_HUB_ID.fullmatch(text) is None or _DATA_FILE.fullmatch(text) or path.exists() or path.parent.is_dir())


def fsync_directory(directory: Path) -> None:
    """Make renames inside ``directory`` durable (POSIX)."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def whole_directory(path: Path) -> Iterator[Path]:
    """Yield a directory that replaces ``path`` if the block succeeds, and is removed if it fails.

    A killed process leaves it as ``.NAME.writing``; see :func:`put_in_place` for the rest.
    """
    temporary = path.with_name(f".{path.name}.writing")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        yield temporary
        put_in_place(temporary, path, path.with_name(f".replaced_{path.name}"))
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def put_in_place(finished: Path, path: Path, aside: Path) -> None:
    """Rename a finished directory to ``path`` once it is on disk, and remove the previous one.

    There are two renames: a crash between them leaves the previous one whole, as ``aside``.
    """
    for root, _, names in os.walk(finished):
        for name in names:
            with (Path(root) / name).open("rb") as file:
                os.fsync(file.fileno())
                if stat.S_IMODE(os.fstat(file.fileno()).st_mode) == 0o600:  # as safetensors makes files
                    os.fchmod(file.fileno(), _usual_mode())
        fsync_directory(Path(root))
    if path.is_dir() and any(path.iterdir()):
        shutil.rmtree(aside, ignore_errors=True)
        path.rename(aside)
        try:
            finished.rename(path)
        except BaseException:
            aside.rename(path)
            raise
    else:
        finished.rename(path)  # an empty directory gives way
    fsync_directory(path.parent)
    shutil.rmtree(aside, ignore_errors=True)


def _usual_mode() -> int:
    """File mode by the user's umask."""
    umask = os.umask(0)
    os.umask(umask)
    return 0o666 & ~umask


def write_atomically(path: Path, content: str | bytes) -> None:
    """Replace ``path`` by ``content``; a crash or a full disk leaves the old file unchanged."""
    path.parent.mkdir(parents=True, exist_ok=True)
    data = content.encode("utf-8") if isinstance(content, str) else content
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).chmod(_usual_mode())  # mkstemp makes files private
        Path(temporary).replace(path)
        fsync_directory(path.parent)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def write_json(path: Path, value: Any) -> None:
    """Write ``value`` atomically as indented strict JSON; NaN and infinity raise ``ValueError``."""
    write_atomically(path, _dump(value, indent=2) + "\n")


def file_sha256(path: Path) -> str:
    hashed = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            hashed.update(chunk)
    return hashed.hexdigest()


def replace_nonfinite(scalars: Mapping[str, Any]) -> dict[str, Any]:
    """Return the row with NaN and infinity replaced by None."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in scalars.items()
    }


def to_json_line(row: Mapping[str, Any]) -> str:
    """Return one JSON object as a line; NaN and infinity raise ``ValueError``."""
    return _dump(row) + "\n"


def _dump(value: Any, indent: int | None = None) -> str:
    """Strict JSON; a lone surrogate, which UTF-8 cannot encode, is escaped."""
    text = json.dumps(value, indent=indent, ensure_ascii=False, allow_nan=False)
    return LONE_SURROGATE.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def write_json_lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write rows atomically, one JSON object per line."""
    write_atomically(path, "".join(map(to_json_line, rows)))


def read_json_lines(path: Path, *, surrogates: bool = True, hint: str = "") -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield ``(line number from 1, object)`` for each line that is not blank.

    ``surrogates`` allows lone surrogates, which our own files may hold as escapes.  Raises DataError if the file cannot
    be read, or a line is too long, not UTF-8 or not a JSON object; ``hint`` says what to do about another format.
    """
    hint = f"; {hint}" if hint else ""
    try:
        with path.open("rb") as file:
            for number, raw in numbered_lines(file):
                if raw is None:
                    raise DataError(f"{path}:{number}: {line_bound()}")
                if not raw.strip():
                    continue
                try:
                    row = parse_json(raw.decode("utf-8"), surrogates=surrogates)
                except (UnicodeDecodeError, JsonError) as error:
                    raise DataError(f"{path}:{number}: expected one JSON object a line; {error}{hint}") from error
                if not isinstance(row, dict):
                    raise DataError(f"{path}:{number}: expected a JSON object, found {type(row).__name__}{hint}")
                yield number, row
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object of a file of somebody else's; empty if there is no such file, or it holds no object.

    Raises JsonError and UnicodeDecodeError.
    """
    content = parse_json(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return content if isinstance(content, dict) else {}


MARKER = "coca-mindspeed.json"
PROGRESS = "progress.json"  # in a run's directory: how far the stage before the first step is
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
    """Remove the entries ``names`` of a directory of ours and its marker, which goes last.

    Raises ConfigError if it is not ours; nothing is removed.
    """
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


def check_output_path(path: Path, overwrite: bool) -> None:
    """Check that an output directory can be created, without writing.

    Raises DataError if it is not empty, or a parent is a file or not writable.
    """
    _check_not_taken(path, overwrite)
    # It is built next to its final path, so the parent's permissions count.
    parent = next(parent for parent in path.absolute().parents if parent.exists())
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
    earlier output as ``.NAME.earlier-*``, which the next run restores.

    Raises:
        DataError: ``path`` is not empty, and is no earlier output of this kind that ``overwrite`` replaces.
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


def cut_back(path: Path, step: int) -> None:
    """Remove rows of later steps, and an incomplete last line; a missing file is left missing.

    Raises DataError if a line before the last one is not a JSON object with an integer ``step``.
    """
    if not path.exists():
        return
    drop_torn_line(path)
    rows = read_steps(path)
    kept = [row for row in rows if row["step"] <= step]
    if len(kept) < len(rows):
        write_json_lines(path, kept)


def drop_torn_line(path: Path) -> None:
    """Remove an incomplete last line, which a killed process left."""
    content = path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if len(whole) < len(content):
        write_atomically(path, whole)


def read_complete_rows(path: Path) -> list[tuple[int, dict[str, Any]]]:
    """Read ``(line number, row)`` of a growing log; a broken last line without newline is skipped."""
    rows = []
    try:
        for row in read_json_lines(path):
            rows.append(row)
    except DataError:
        if path.read_bytes().endswith(b"\n"):
            raise
    return rows


def read_steps(path: Path, *, torn_end: bool = False) -> list[dict[str, Any]]:
    """Read the rows of a log; ``torn_end`` skips an incomplete last line.

    Raises DataError if a line is not a JSON object with an integer ``step``.
    """
    rows = read_complete_rows(path) if torn_end else list(read_json_lines(path))
    for number, row in rows:
        if not isinstance(row.get("step"), int):
            raise DataError(f"{path}:{number}: expected an integer 'step', found {row.get('step')!r}")
    return [row for _, row in rows]
