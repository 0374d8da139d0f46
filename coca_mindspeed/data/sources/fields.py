"""Checked access to the columns of a source's row."""

import ast
import math
from collections.abc import Mapping
from typing import Any


class RowError(ValueError):
    """The row is not in the source's form."""


class Ungradable(ValueError):  # noqa: N818 - a fact about a well-formed row, not an error of the file
    """The row is well-formed, but there is nothing to grade an answer by."""


def column(row: Mapping[str, Any], *names: str) -> Any:
    """Return the value of the first of ``names`` that the row has; raises RowError if it has none."""
    for name in names:
        if name in row:
            return row[name]
    wanted = " or ".join(repr(name) for name in names)
    raise RowError(f"column {wanted} is missing; the row has {', '.join(map(repr, row)) or 'none'}")


def text(row: Mapping[str, Any], *names: str) -> str:
    """Return a non-blank string; raises RowError if it is missing, blank or not a string."""
    value = column(row, *names)
    if not isinstance(value, str):
        raise RowError(f"column {names[0]!r} should be a string, found {describe(value)}")
    if not value.strip():
        raise RowError(f"column {names[0]!r} is empty")
    return value


def scalar_text(row: Mapping[str, Any], *names: str) -> str:
    """Return a string or number as stripped text; raises RowError if it is missing, blank or neither."""
    value = column(row, *names)
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise RowError(f"column {names[0]!r} should be a string or a number, found {describe(value)}")
    if isinstance(value, float):
        if not math.isfinite(value):
            raise RowError(f"column {names[0]!r} should be finite, found {value}")
        value = int(value) if value.is_integer() else value
    stripped = str(value).strip()
    if not stripped:
        raise RowError(f"column {names[0]!r} is empty")
    return stripped


def text_list(row: Mapping[str, Any], name: str) -> list[str]:
    """Return a list of strings, empty for null; raises RowError for anything else."""
    value = column(row, name)
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise RowError(f"column {name!r} should be a list of strings, found {describe(value)}")
    return value


def optional(row: Mapping[str, Any], **columns: str) -> dict[str, Any]:
    """Return metadata ``{key: value}`` of the columns that exist and hold a JSON value."""
    found = {key: row[name] for key, name in columns.items() if row.get(name) not in (None, "", [])}
    return {key: value for key, value in found.items() if isinstance(value, (str, int, float, list, dict))}


def literal(value: str, name: str, expected: str) -> Any:
    """Parse a Python literal in a string; raises RowError if it is not one, or too large or deep."""
    try:
        return ast.literal_eval(value)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError) as error:
        raise RowError(f"column {name!r} should be {expected}, found {describe(value)}") from error


def describe(value: Any) -> str:
    """Return the value's type and beginning, for messages."""
    return "null" if value is None else f"{type(value).__name__} {value!r:.60}"
