"""The record files of a run: the same on every node, and the same when the run is resumed.

Rows carry the index of their record: a node with another version of a file would grade responses by the answers to
other questions.
"""

import socket
from collections.abc import Iterable, Mapping
from pathlib import Path

from coca_mindspeed.data.records import Record, read_records
from coca_mindspeed.errors import ConfigError, DataError
from coca_mindspeed.mindspeed.start.settings import CocaSettings
from coca_mindspeed.utils.files import file_sha256


def record_files(data_path: str | None, eval_data: str | Path | None) -> list[Path]:
    """Those of the two that are given."""
    return [Path(path) for path in (data_path, eval_data) if path is not None]


def digests(paths: Iterable[Path]) -> dict[str, str]:
    """SHA-256 by path of the files that are on this machine; a run may be planned and started elsewhere."""
    return {str(path): file_sha256(path) for path in paths if path.is_file()}


def with_digests(settings: CocaSettings, files: Iterable[Path]) -> CocaSettings:
    """The settings with the SHA-256 of this machine's files, with which every other node compares its own.

    Raises:
        ConfigError: a file has changed since the run was planned.
    """
    planned, found = settings.data_sha256, digests(files)
    for path, digest in found.items():
        if planned.get(path, digest) != digest:
            raise ConfigError(
                f"coca.data_sha256: {path} has changed since the run was planned (SHA-256 {planned[path][:12]}…, found "
                f"{digest[:12]}…); plan it again: start it by its launch script, or run coca-mindspeed check --write"
            )
    return settings.model_copy(update={"data_sha256": {**planned, **found}})


def read_run_records(path: Path, planned: Mapping[str, str]) -> list[Record]:
    """Read a record file of the run on the node of this process.

    Args:
        path: of the file.
        planned: ``coca.data_sha256``; a file that it does not name is not checked.

    Raises:
        DataError: the file differs on this node, or is no record file.
    """
    wanted = planned.get(str(path))
    if wanted is not None and (found := file_sha256(path)) != wanted:
        raise DataError(
            f"{path}: on {socket.gethostname()} the file has SHA-256 {found[:12]}…, expected {wanted[:12]}… as where "
            "the run was started; copy it to every node, or use a shared file system"
        )
    return list(read_records(path))
