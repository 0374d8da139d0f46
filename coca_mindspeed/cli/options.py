"""Types of options: a value out of range is a usage error, told with the option's name."""

import argparse
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any


def at_least(lowest: int, highest: int | None = None) -> Callable[[str], int]:
    """The type of a whole number from ``lowest`` on, or to ``highest``."""
    expected = f"a whole number from {lowest} {'on' if highest is None else f'to {highest}'}"

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = lowest - 1
        if value < lowest or (highest is not None and value > highest):
            raise argparse.ArgumentTypeError(f"expected {expected}, found {text[:40]!r}")
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


def place(text: str) -> Path:
    """The type of a file or directory; an empty name, as an unset variable leaves behind, is none."""
    if not text:
        raise argparse.ArgumentTypeError("expected a file or directory, found an empty name")
    return Path(text)


def within(low: float, high: float) -> Callable[[str], float]:
    """The type of a number from ``low`` to ``high``."""
    return number(f"a number from {low:g} to {high:g}", lambda value: low <= value <= high)


def above(low: float) -> Callable[[str], float]:
    """The type of a finite number above ``low``."""
    return number(f"a number above {low:g}", lambda value: low < value < float("inf"))


def json_object(text: str) -> dict[str, Any]:
    """The type of an object written as JSON."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"expected a JSON object such as '{{\"seconds\": 10}}', found {text[:40]!r}")
    return value


def template_variables(text: str) -> dict[str, Any]:
    """The type of variables for a chat template, written as a JSON object."""
    from coca_mindspeed.config.schema import template_variables as checked  # --help needs no schema

    try:
        return checked(json_object(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def day(text: str) -> str:
    """The type of a date, YYYY-MM-DD."""
    from coca_mindspeed.config.schema import template_day

    try:
        template_day(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


def device_name(text: str) -> str:
    """The type of a device's name; whether the device is there is another question."""
    from coca_mindspeed.config.schema import DEVICE_PATTERN  # --help needs no schema

    if not re.fullmatch(DEVICE_PATTERN, text):
        raise argparse.ArgumentTypeError(f"expected auto, cpu, cuda, cuda:N, npu or npu:N, found {text[:40]!r}")
    return text
