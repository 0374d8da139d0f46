"""Python values as JSON, between the process of the tests and that of the program.

Only data crosses; other objects become opaque references. pickle is not used because it can run code.
"""

import collections
import importlib
import sys
from collections.abc import Callable
from typing import Any

_LARGEST_PLAIN_INTEGER = 2**53


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
    """The value of its JSON; ``ValueError`` or ``TypeError`` for JSON that :func:`encode` never makes."""
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
