"""The record files of a run: the same on every node, and the same when it is resumed.

Rows carry the index of their record, so a node with another version of a file would judge responses by the answers to
other questions.
"""

import socket
from collections.abc import Iterable, Mapping
from pathlib import Path

from coca_mindspeed.data.records import Record, read_records
from coca_mindspeed.errors import ConfigError, DataError
from coca_mindspeed.mindspeed.stages.columns import is_record_file
from coca_mindspeed.utils.files import file_sha256


def record_files(data_path: str | None, eval_data: str | Path | None) -> list[Path]:
    """Those of the two that hold records: ``data_path`` may be a prefix of a data set of MindSpeed-RL's own."""
    train = data_path if data_path is not None and is_record_file(data_path) else None
    return [Path(path) for path in (train, eval_data) if path is not None]


def digests(paths: Iterable[Path]) -> dict[str, str]:
    """SHA-256 of each file that is here, by its path; a run may be planned and started where its data are not."""
    return {str(path): file_sha256(path) for path in paths if path.is_file()}


def check_planned(planned: Mapping[str, str], found: Mapping[str, str]) -> None:
    """Refuse files that are not those of the plan.

    Raises:
        ConfigError: names the first.
    """
    for path, digest in found.items():
        if planned.get(path, digest) != digest:
            raise ConfigError(
                f"coca.data_sha256: {path} has changed since the run was planned (SHA-256 {planned[path][:12]}…, found "
                f"{digest[:12]}…); plan it again: start it by its launch script, or run coca-mindspeed check --write"
            )


def read_run_records(path: Path, planned: Mapping[str, str]) -> list[Record]:
    """Records of a file of the run, on whichever node this process is.

    Args:
        path: of the file.
        planned: ``coca.data_sha256``; a file that is not in it is taken as it is.

    Raises:
        DataError: it is another file here, or no record file.
    """
    wanted = planned.get(str(path))
    if wanted is not None and (found := file_sha256(path)) != wanted:
        raise DataError(
            f"{path}: on {socket.gethostname()} it is another file (SHA-256 {found[:12]}…) than where the run was "
            f"started ({wanted[:12]}…); copy it to every node, or keep it where all of them read the same"
        )
    return list(read_records(path))
