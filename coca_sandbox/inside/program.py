"""The process of the model's program, as an untrusted server of its functions: one JSON object per line.

The tests are in another process. The program can write to both descriptors and replace all code here; see
``remote.py``. Only data crosses; other objects become opaque references. pickle is not used because it can run code.
"""

import builtins
import collections
import importlib
import json
import operator
import os
import re
import sys
import types
from collections.abc import Callable
from typing import Any

_LARGEST_PLAIN_INTEGER = 2**53
_SEQUENCES: dict[str, Any] = {"tuple": tuple, "set": set, "frozenset": frozenset, "deque": collections.deque}
_SCALARS: dict[str, Callable[[Any], Any]] = {
    "int": lambda text: int(text, 16),
    "float": float.fromhex,
    "complex": lambda parts: complex(*map(float.fromhex, parts)),
    "bytes": bytes.fromhex,
    "range": lambda parts: range(*parts),
    "fraction": lambda parts: importlib.import_module("fractions").Fraction(*(int(part, 16) for part in parts)),
    "decimal": lambda text: importlib.import_module("decimal").Decimal(text),
}


class CannotCrossError(TypeError):
    """A value is neither plain data nor a reference to the other side."""


def encode(value: Any, reference: Callable[[Any], Any]) -> Any:
    """JSON for ``value``; ``reference`` is called for objects that are not data and may raise ``CannotCrossError``."""
    if value is None or isinstance(value, bool | str):
        # A subclass may override str().
        return str.__str__(value) if isinstance(value, str) else value
    if isinstance(value, int):
        number = int.__int__(value)
        return number if abs(number) < _LARGEST_PLAIN_INTEGER else {"int": hex(number)}
    if isinstance(value, float):
        return {"float": float.hex(value)}
    if isinstance(value, complex):
        return {"complex": [float.hex(value.real), float.hex(value.imag)]}
    if isinstance(value, list):
        return [encode(item, reference) for item in list.__iter__(value)]
    for name, kind in _SEQUENCES.items():
        if isinstance(value, kind):
            return {name: [encode(item, reference) for item in kind.__iter__(value)]}
    if isinstance(value, dict):
        return {"dict": [[encode(k, reference), encode(v, reference)] for k, v in dict.items(value)]}
    if isinstance(value, bytes | bytearray):
        return {"bytes": bytes(value).hex()}
    if isinstance(value, range):
        return {"range": [value.start, value.stop, value.step]}
    # Not imported here: these processes start once for each program.
    if (fractions := sys.modules.get("fractions")) and isinstance(value, fractions.Fraction):
        return {"fraction": [hex(value.numerator), hex(value.denominator)]}
    if (decimal := sys.modules.get("decimal")) and isinstance(value, decimal.Decimal):
        return {"decimal": str(value)}
    # A number of NumPy's equals Python's wherever tests compare it.
    if (numpy := sys.modules.get("numpy")) and isinstance(value, numpy.generic):
        plain = value.item()
        if not isinstance(plain, numpy.generic):  # a long double stays one
            return encode(plain, reference)
    return {"reference": reference(value)}


def decode(value: Any, dereference: Callable[[Any], Any]) -> Any:
    """Decode the JSON of a value; ``ValueError`` or ``TypeError`` for JSON that :func:`encode` never makes."""
    if value is None or isinstance(value, bool | str | int):
        return value
    if isinstance(value, list):
        return [decode(item, dereference) for item in value]
    if not isinstance(value, dict) or len(value) != 1:
        raise ValueError("not an encoded value")
    ((name, content),) = value.items()
    if name in _SEQUENCES:
        return _SEQUENCES[name](decode(item, dereference) for item in content)
    if name == "dict":
        return {decode(k, dereference): decode(v, dereference) for k, v in content}
    if name == "reference":
        return dereference(content)
    if name not in _SCALARS:
        raise ValueError("not an encoded value")
    return _SCALARS[name](content)


# Names that a program finds defined: typing's, which decorate signatures, and for a class ``Solution`` LeetCode's.
_LEETCODE = {"bisect", "collections", "functools", "heapq", "itertools", "math", "operator", "random", "re", "string"}
_STARRED = ("collections", "heapq", "bisect", "functools", "itertools", "math")


def names_for(source: str) -> dict[str, Any]:
    """Names that the program finds defined without importing them, if its source mentions them."""
    mentioned = set(re.findall(r"[A-Za-z]\w*", source))
    of_leetcode = "Solution" in mentioned
    names: dict[str, Any] = {}
    for module in map(importlib.import_module, (*(_STARRED if of_leetcode else ()), "typing")):
        public = mentioned.intersection(getattr(module, "__all__", dir(module))) - vars(builtins).keys()
        names |= {name: getattr(module, name) for name in public}
    modules = mentioned & _LEETCODE if of_leetcode else ()
    return names | {name: importlib.import_module(name) for name in modules}


_OPERATIONS: dict[str, Callable[..., Any]] = {
    "call": lambda target, *arguments, **keywords: target(*arguments, **keywords),
    "get": getattr, "set": setattr, "item": operator.getitem, "length": len, "truth": bool, "iterate": list,
}  # fmt: skip


class Server:
    """Loads the program and answers requests one by one."""

    def __init__(self) -> None:
        self._module = types.ModuleType("program")
        self._objects: list[Any] = []

    def load(self, request: dict[str, Any]) -> dict[str, Any]:
        sys.modules["program"] = self._module  # dataclasses look their module up
        names = self._module.__dict__
        provided = names_for(request["source"])
        names.update(provided)
        exec(compile(request["source"], "<program>", "exec"), names)  # noqa: S102  # the sandbox's point
        if (entry_point := request.get("entry_point")) and entry_point not in names:
            solution = names.get("Solution")  # the form in which LeetCode asks for answers
            if isinstance(solution, type) and hasattr(solution, entry_point):
                names[entry_point] = getattr(solution(), entry_point)
        exports = {
            name: self._encode(names[name])
            for name in request["names"]
            if name in names and not (name in provided and names[name] is provided[name])
        }
        return {"exports": exports}

    def call(self, request: dict[str, Any]) -> dict[str, Any]:
        arguments = [decode(item, self._objects.__getitem__) for item in request["arguments"]]
        keywords = {name: decode(item, self._objects.__getitem__) for name, item in request["keywords"].items()}
        operation = _OPERATIONS[request["operation"]]
        return {"value": self._encode(operation(self._objects[request["target"]], *arguments, **keywords))}

    def _encode(self, value: Any) -> Any:
        return encode(value, self._reference)

    def _reference(self, value: Any) -> int:
        self._objects.append(value)
        return len(self._objects) - 1


def main(requests_fd: int, answers_fd: int) -> None:
    server = Server()
    with (
        open(requests_fd, encoding="ascii") as requests,
        open(answers_fd, "w", encoding="ascii") as answers,
    ):  # descriptors
        for line in requests:
            request = json.loads(line)
            try:
                answer = server.load(request) if "source" in request else server.call(request)
            except BaseException as error:  # noqa: BLE001  # exit() and KeyboardInterrupt are the program's, too
                answer = {"error": type(error).__name__, "message": _text(error)}
            answers.write(json.dumps(answer) + "\n")
            answers.flush()


def _text(error: BaseException) -> str:
    try:
        return str(error)[:500]
    except BaseException:  # noqa: BLE001  # __str__ is the program's as well
        return ""


if __name__ == "__main__":
    # Requests and answers leave the standard streams, which the program uses.
    REQUESTS, ANSWERS = os.dup(0), os.dup(1)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1):
        os.dup2(nowhere, stream)
    main(REQUESTS, ANSWERS)
