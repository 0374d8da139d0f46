"""JSON of strangers: what Python's parser would stumble over later, or fall over, is refused with its reason."""

import difflib
import json
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import yaml

LONGEST_LINE = 64 << 20  # bytes; parsed, a line takes up to twenty times as much memory
DEEPEST = 100  # levels of lists and objects; copying and writing recurse through each of them
_BOM = b"\xef\xbb\xbf"
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


class JsonError(ValueError):
    """The text is not JSON that can be used; the message says why, in words for the user."""


class JsonLimitError(JsonError):
    """It is JSON, and beyond what is read: too deep, or an integer too long."""


def parse_json(text: str, *, surrogates: bool = False) -> Any:
    r"""The value of a JSON text.

    Args:
        text: the JSON.
        surrogates: let halves of surrogate pairs (``\ud800``) pass, which no UTF-8 can hold.

    Raises:
        JsonError: it is broken, nested more than :data:`DEEPEST` levels deep, holds an integer beyond Python's limit
            of 4300 digits, or half of a surrogate pair.
    """
    try:
        value = json.loads(text)
    except RecursionError as error:
        raise JsonLimitError(f"nested more than {DEEPEST} levels deep") from error
    except json.JSONDecodeError as error:
        raise JsonError(str(error)) from error
    except ValueError as error:
        raise JsonLimitError("it holds an integer of more than 4300 digits") from error
    check_depth(value, text)
    if not surrogates and _SURROGATE.search(text):
        try:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError as error:
            raise JsonError(f"it holds half of a surrogate pair ({error.object[error.start]!a})") from error
    return value


def check_depth(value: Any, text: str) -> None:
    """Refuse a value that ``text`` nests too deeply.

    Raises:
        JsonError: it does.
    """
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


def numbered_lines(file: BinaryIO) -> Iterator[tuple[int, bytes | None]]:
    """Yield ``(number from 1, line)``, without the byte order mark that a file may begin with.

    None stands for a line of more than :data:`LONGEST_LINE` bytes, which is read past without being held.
    """
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
    """Why a line is not read."""
    return f"longer than the {LONGEST_LINE} bytes that a line may have"


class YamlError(ValueError):
    """The text is not YAML that can be used; the message says why, without the file's name."""


def read_yaml(path: Path) -> Any:
    """The value of a file's only document; None if it is empty.

    Raises:
        OSError: it cannot be read.
        YamlError: it is not UTF-8, broken, nested too deeply for Python, or holds what YAML takes for a number or a
            date and Python cannot make one of: an integer of more than 4300 digits, the 31st of a thirteenth month.
    """
    return parse_yaml(path.read_bytes())


def parse_yaml(text: bytes) -> Any:
    """The same of a text; see :func:`read_yaml`."""
    try:
        return yaml.safe_load(text.decode("utf-8"))
    except RecursionError as error:
        raise YamlError("nested too deeply") from error
    # UnicodeDecodeError is a ValueError as well; the others are PyYAML's own, of !!timestamp, !!bool and !!int.
    except (ValueError, AttributeError, LookupError, yaml.YAMLError) as error:
        raise YamlError(str(error)) from error


Difference = tuple[str, Any, Any]


def first_difference(before: Mapping[str, Any], now: Mapping[str, Any], *, under: str = "") -> Difference | None:
    """The dotted key, what stood there before and what stands there now, of the first key in order that differs.

    Args:
        before: nested mappings; a key that one of the two lacks is None there.
        now: the same.
        under: what the keys' names begin with.
    """
    for name in sorted({*before, *now}):
        one, other, key = before.get(name), now.get(name), f"{under}{name}"
        if isinstance(one, Mapping) and isinstance(other, Mapping):
            if (found := first_difference(one, other, under=f"{key}.")) is not None:
                return found
        elif one != other:
            return key, one, other
    return None


def did_you_mean(name: str, known: Collection[str]) -> str:
    """``, did you mean 'x'?`` if one of ``known`` is similar, else an empty string."""
    close = difflib.get_close_matches(name, sorted(known), n=1)
    return f", did you mean {close[0]!r}?" if close else ""
