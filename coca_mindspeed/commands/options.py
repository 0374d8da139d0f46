"""Types of options: a value out of range is a usage error, told with the option's name."""

import argparse
from collections.abc import Callable


def at_least(lowest: int) -> Callable[[str], int]:
    """The type of a whole number from ``lowest`` on."""

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = lowest - 1
        if value < lowest:
            raise argparse.ArgumentTypeError(f"expected a whole number from {lowest} on, found {text[:40]!r}")
        return value

    return read


def number(expected: str, holds: Callable[[float], bool]) -> Callable[[str], float]:
    """The type of a number for which ``holds`` is true, told as ``expected``; NaN never is one."""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = float("nan")
        if value != value or not holds(value):
            raise argparse.ArgumentTypeError(f"expected {expected}, found {text[:40]!r}")
        return value

    return read
