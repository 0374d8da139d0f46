"""JSON and YAML from users, with limits and one error type each."""

import gzip
import json
import re
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

import yaml

LONGEST_LINE = 64 << 20  # bytes; parsed, a line takes up to twenty times as much memory
DEEPEST = 100  # levels of lists and objects; copying and writing recurse through each of them
_BOM = b"\xef\xbb\xbf"
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


class JsonError(ValueError):
    """The text is not usable JSON."""


class JsonLimitError(JsonError):
    """The JSON exceeds a limit: nesting depth or integer length."""


def parse_json(text: str, *, surrogates: bool = False) -> Any:
    """Parse a JSON text; ``surrogates`` allows lone surrogates, which UTF-8 cannot encode.

    Raises JsonError if it is broken, nested more than :data:`DEEPEST` levels deep, or holds an integer of more than
    4300 digits or a lone surrogate.
    """
    try:
        value = json.loads(text)
    except RecursionError as error:
        raise JsonLimitError(f"nested more than {DEEPEST} levels deep") from error
    except json.JSONDecodeError as error:
        raise JsonError(f"{error.msg} at {_position(error, text)}") from error
    except ValueError as error:
        raise JsonLimitError("it holds an integer of more than 4300 digits") from error
    check_depth(value, text)
    if not surrogates and _SURROGATE.search(text):
        try:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError as error:
            raise JsonError(f"it holds half of a surrogate pair ({error.object[error.start]!a})") from error
    return value


def _position(error: json.JSONDecodeError, text: str) -> str:
    """Line and column; the column alone of one line, whose number in its file the caller knows."""
    if "\n" in text.strip():
        return f"line {error.lineno} column {error.colno}"
    return f"column {min(error.pos, len(text.rstrip())) + 1}"


def check_depth(value: Any, text: str) -> None:
    """Raise JsonError if ``value``, parsed from ``text``, is nested too deeply."""
    if text.count("[") + text.count("{") <= DEEPEST:
        return
    waiting = [(value, 1)]
    while waiting:
        inner, depth = waiting.pop()
        if depth > DEEPEST and isinstance(inner, (dict, list)):
            raise JsonLimitError(f"nested more than {DEEPEST} levels deep")
        if isinstance(inner, dict):
            waiting += [(item, depth + 1) for item in inner.values()]
        elif isinstance(inner, list):
            waiting += [(item, depth + 1) for item in inner]


@contextmanager
def open_bytes(path: Path) -> Iterator[BinaryIO]:
    """Open a file to read its bytes, those of a ``.gz`` unpacked; OSError, also while it is read, if that fails."""
    try:
        with gzip.open(path) if path.suffix.lower() == ".gz" else path.open("rb") as file:
            yield cast(BinaryIO, file)
    except (EOFError, zlib.error) as error:
        raise OSError(f"damaged gzip data: {error}") from error


def numbered_lines(file: BinaryIO) -> Iterator[tuple[int, bytes | None]]:
    """Yield ``(number from 1, line)`` without a byte order mark; None for a line above :data:`LONGEST_LINE` bytes."""
    number = 0
    while line := file.readline(LONGEST_LINE + 1):
        number += 1
        if len(line) > LONGEST_LINE and not line.endswith(b"\n"):
            while line and not line.endswith(b"\n"):
                line = file.readline(1 << 20)
            yield number, None
        else:
            yield number, line.removeprefix(_BOM) if number == 1 else line


def line_bound() -> str:
    return f"longer than the {LONGEST_LINE} bytes that a line may have"


class YamlError(ValueError):
    """The text is not usable YAML."""


def read_yaml(path: Path) -> Any:
    """A file's only document, None if it is empty; raises OSError, or YamlError for anything but valid YAML."""
    return parse_yaml(path.read_bytes())


def parse_yaml(text: bytes) -> Any:
    """Parse a YAML text; see :func:`read_yaml`."""
    try:
        return yaml.safe_load(text.decode("utf-8"))
    except RecursionError as error:
        raise YamlError("nested too deeply") from error
    # UnicodeDecodeError is a ValueError as well; the others are PyYAML's own, of !!timestamp, !!bool and !!int.
    except (ValueError, AttributeError, LookupError, yaml.YAMLError) as error:
        raise YamlError(str(error)) from error


def value_of(values: Any, key: str, default: Any = None) -> Any:
    """The value of a dotted key in nested mappings and lists, or ``default`` if it or a section above it is absent."""
    for part in key.split("."):
        if isinstance(values, Mapping) and part in values:
            values = values[part]
        elif isinstance(values, list) and part.isdecimal() and int(part) < len(values):
            values = values[int(part)]
        else:
            return default
    return values


Difference = tuple[str, Any, Any]


def differences(before: Mapping[str, Any], now: Mapping[str, Any], *, under: str = "") -> Iterator[Difference]:
    """Yield dotted key (after ``under``), old and new value where nested mappings differ; a missing key is None."""
    for name in sorted({*before, *now}):
        one, other, key = before.get(name), now.get(name), f"{under}{name}"
        if isinstance(one, Mapping) and isinstance(other, Mapping):
            yield from differences(one, other, under=f"{key}.")
        elif one != other:
            yield key, one, other


def first_difference(before: Mapping[str, Any], now: Mapping[str, Any], *, under: str = "") -> Difference | None:
    """The first of the :func:`differences`; None if there is none."""
    return next(differences(before, now, under=under), None)
