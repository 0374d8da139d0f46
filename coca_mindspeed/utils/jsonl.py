"""JSON Lines logs with one row per training step."""

from pathlib import Path
from typing import Any

from coca_mindspeed.errors import DataError
from coca_mindspeed.utils.files import read_json_lines, write_atomically, write_json_lines


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
