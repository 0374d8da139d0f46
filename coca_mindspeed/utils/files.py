"""Atomic files and directories, the SHA-256 of a file, and names that are no files but ids of the hub."""

import hashlib
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def fsync_directory(directory: Path) -> None:
    """Make renames inside ``directory`` durable (POSIX)."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def whole_directory(path: Path) -> Iterator[Path]:
    """Yield ``.NAME.writing``, which replaces ``path`` if the block succeeds, and is removed if it fails."""
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


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Let the OSError of a write, which names no file if the disk is full, name ``path``."""
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


def write_atomically(path: Path, content: str | bytes) -> None:
    """Replace ``path`` by ``content``; a crash or a full disk leaves the old file unchanged, and OSError names it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    data = content.encode("utf-8") if isinstance(content, str) else content
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with naming(path), os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).chmod(_usual_mode())  # mkstemp makes files private
        Path(temporary).replace(path)
        fsync_directory(path.parent)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def file_sha256(path: Path) -> str:
    hashed = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            hashed.update(chunk)
    return hashed.hexdigest()


_HUB_ID = re.compile(r"(?!(?:models|runs|data)/)[\w-]+/[\w.-]+(:[\w.-]*){0,2}", re.ASCII)
_DATA_FILE = re.compile(r".*\.(jsonl?|ndjson|csv|tsv|parquet|arrow|gz)", re.IGNORECASE)


def is_hub_id(text: str) -> bool:
    """True for the id of a model or data set of the hub (ORG/NAME[:CONFIGURATION[:SPLIT]]) that is not a local path."""
    path = Path(text)
    return not (_HUB_ID.fullmatch(text) is None or _DATA_FILE.fullmatch(text) or path.exists() or path.parent.is_dir())


_SLICE = 2**20  # bytes


def fingerprint(path: Path | None) -> str | None:
    """SHA-256 of names, sizes, and first and last megabytes of a file or a directory's files; None if missing.

    Weights that were trained further differ everywhere, and reading all of them would take long.
    """
    if path is None or not path.exists():
        return None
    digest = hashlib.sha256()
    for file in sorted(path.iterdir()) if path.is_dir() else [path]:
        if not file.is_file():
            continue
        size = file.stat().st_size
        digest.update(f"{file.name if path.is_dir() else ''}\0{size}\0".encode())
        with file.open("rb") as content:
            digest.update(content.read(_SLICE))
            content.seek(max(_SLICE, size - _SLICE))
            digest.update(content.read())
    return digest.hexdigest()
