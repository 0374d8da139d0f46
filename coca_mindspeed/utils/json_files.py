"""Strict JSON and JSON Lines: errors name the line; logs by step can be cut back."""

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import UnionType
from typing import Any

from coca_mindspeed.errors import DataError, show_value
from coca_mindspeed.utils.files import write_atomically
from coca_mindspeed.utils.text_formats import JsonError, line_bound, numbered_lines, open_bytes, parse_json

# Half of a UTF-16 pair: JSON can name one (\ud83d), UTF-8 cannot hold one.
LONE_SURROGATE = re.compile("[\ud800-\udfff]")


def write_json(path: Path, value: Any) -> None:
    """Write ``value`` atomically as indented strict JSON; NaN and infinity raise ``ValueError``."""
    write_atomically(path, _dump(value, indent=2) + "\n")


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
    """Yield ``(line number from 1, object)`` for each line that is not blank; ``.gz`` is unpacked.

    ``surrogates`` allows lone surrogates, which our own files may hold as escapes.  Raises DataError if the file cannot
    be read, or a line is too long, not UTF-8 or not a JSON object; ``hint`` says what to do about another format.
    """
    hint = f"; {hint}" if hint else ""
    try:
        with open_bytes(path) as file:
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


def read_object(path: Path, **required: type | UnionType) -> dict[str, Any]:
    """The JSON object of a file; empty without the file.

    ``required`` are the keys that an object must have, with the types of their values.  Raises DataError if the file
    cannot be read, or holds anything else.
    """
    if not path.is_file():
        return {}
    try:
        content = parse_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (UnicodeDecodeError, JsonError) as error:
        raise DataError(f"{path}: expected a JSON object: {error}; restore the file") from error
    if not isinstance(content, dict):
        raise DataError(f"{path}: expected a JSON object, found {type(content).__name__}; restore the file")
    for name, kind in required.items():
        if not isinstance(value := content.get(name), kind) or isinstance(value, bool):
            kinds = kind.__name__ if isinstance(kind, type) else str(kind)
            raise DataError(f"{path}: {name}: expected {kinds}, found {show_value(value)}; restore the file")
    return content


def cut_back(path: Path, step: int) -> None:
    """Remove rows of later steps, and an incomplete last line; DataError if another line has no integer ``step``."""
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
    """Read rows with an integer ``step``, else DataError; ``torn_end`` skips an incomplete last line."""
    rows = read_complete_rows(path) if torn_end else list(read_json_lines(path))
    for number, row in rows:
        if not isinstance(row.get("step"), int):
            raise DataError(f"{path}:{number}: expected an integer 'step', found {row.get('step')!r}")
    return [row for _, row in rows]
