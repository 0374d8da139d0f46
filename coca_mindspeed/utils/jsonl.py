"""Logs that grow by a row a step: what a resumed run finds of them, and cuts off."""

from pathlib import Path
from typing import Any

from coca_mindspeed.errors import DataError
from coca_mindspeed.utils.files import read_json_lines, write_atomically, write_json_lines


def cut_back(path: Path, step: int) -> None:
    """Remove rows of later steps, and a last line that a full disk or a crash left without its end.

    Raises:
        DataError: a line before the last one is no JSON object, or one says no whole-number ``step``.
    """
    if not path.exists():
        return
    content = path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if len(whole) < len(content):
        write_atomically(path, whole)
    rows = read_steps(path)
    kept = [row for row in rows if row["step"] <= step]
    if len(kept) < len(rows):
        write_json_lines(path, kept)


def read_steps(path: Path, *, torn_end: bool = False) -> list[dict[str, Any]]:
    """The rows of a log, every one of them with a whole-number ``step``.

    Args:
        path: of the log.
        torn_end: leave a last line out that is not whole.

    Raises:
        DataError: naming the line that is something else.
    """
    rows = []
    try:
        for number, row in read_json_lines(path):
            if not isinstance(row.get("step"), int):
                raise DataError(f"{path}:{number}: expected a whole-number 'step', found {row.get('step')!r}")
            rows.append(row)
    except DataError:
        if not torn_end or path.read_bytes().endswith(b"\n"):
            raise
    return rows
