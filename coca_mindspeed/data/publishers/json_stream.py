"""Elements of a large JSON array, one at a time, without holding the array."""

import json
import re
from collections.abc import Iterator
from typing import Any, TextIO

from coca_mindspeed.errors import DataError
from coca_mindspeed.json_text import DEEPEST, LONGEST_LINE, JsonError, check_depth

_CHUNK = 1 << 20  # characters
_TAIL = 4  # a number cut by the end of a chunk parses without its last ".", "e" or "e-"
_WHITESPACE = " \t\r\n"
# TriviaQA's own files are one object whose first key holds the rows.
_WRAPPED = re.compile(r'\s*(?:\{\s*"(?:Data|data|rows|examples)"\s*:\s*)?\[')


def wrapped_elements(file: TextIO, name: str) -> Iterator[Any] | None:
    """Elements of the array that the file is, or that is the value of its first key; None if it starts otherwise.

    An element that is nested too deeply is yielded as the :class:`~coca_mindspeed.json_text.JsonError` that says so.

    Raises:
        DataError: while iterating: the array is broken, or its parser cannot go on; the message names the element.
    """
    head = file.read(_CHUNK)
    match = _WRAPPED.match(head)
    return None if match is None else _elements(file, name, head[match.end() :])


def _elements(file: TextIO, name: str, buffer: str) -> Iterator[Any]:
    decode = json.JSONDecoder().raw_decode
    position, number, ended, chunk = 0, 0, False, _CHUNK
    while True:
        # Invariant: buffer[position:] starts at or before an element, a comma or the closing bracket.
        while position < len(buffer) and buffer[position] in _WHITESPACE:
            position += 1
        try:
            if position < len(buffer) and buffer[position] == "]":
                return
            start = position
            if number and position < len(buffer):
                if buffer[position] != ",":
                    raise DataError(f"{name}: expected ',' or ']' after element {number}, found {buffer[position]!r}")
                start += 1
            while start < len(buffer) and buffer[start] in _WHITESPACE:
                start += 1
            value, end = decode(buffer, start)
            if len(buffer) - end < _TAIL and not ended:
                raise json.JSONDecodeError("may go on", buffer, end)
        except json.JSONDecodeError as error:
            if ended or len(buffer) - position > LONGEST_LINE:
                raise DataError(f"{name}: element {number + 1} of the array is not JSON: {error.msg}") from error
            more = file.read(chunk)
            ended, chunk = not more, chunk * 2
            buffer, position = buffer[position:] + more, 0
            continue
        except RecursionError as error:
            raise DataError(f"{name}: element {number + 1} is nested more than {DEEPEST} levels deep") from error
        except ValueError as error:
            raise DataError(f"{name}: element {number + 1} holds an integer of more than 4300 digits") from error
        if end - start > LONGEST_LINE:
            raise DataError(f"{name}: element {number + 1} is longer than the {LONGEST_LINE} characters one may have")
        try:
            check_depth(value, buffer[start:end])
        except JsonError as error:
            value = error
        number, position, chunk = number + 1, end, _CHUNK
        yield value
