"""Types of command-line options; a value out of range is a usage error that names the option."""

import argparse
import importlib
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from coca_mindspeed.errors import CocaError


def subcommand(actions: Any, name: str, summary: str, **options: Any) -> argparse.ArgumentParser:
    """Add a parser whose help and description are ``summary``."""
    about = f"{summary[0].upper()}{summary[1:]}."
    parser: argparse.ArgumentParser = actions.add_parser(name, help=summary, **{"description": about, **options})
    return parser


def bins_closed(parser: argparse.ArgumentParser) -> None:
    """Add ``--bins-closed``."""
    side = "side of a bin's edge (default: %(default)s)"
    parser.add_argument("--bins-closed", choices=("right", "left"), default="right", help=side)


def at_least(lowest: int, highest: int | None = None) -> Callable[[str], int]:
    """Integer from ``lowest``, up to ``highest`` if given."""
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
    """Number for which ``holds`` is true; NaN is refused.  ``expected`` describes it in messages."""

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
    """Path; refuses an empty string, as an unset shell variable gives."""
    if not text:
        raise argparse.ArgumentTypeError("expected a file or directory, found an empty name")
    return Path(text)


def within(low: float, high: float) -> Callable[[str], float]:
    """Number in [low, high]."""
    return number(f"a number from {low:g} to {high:g}", lambda value: low <= value <= high)


def above(low: float) -> Callable[[str], float]:
    """Finite number above ``low``."""
    return number(f"a number above {low:g}", lambda value: low < value < float("inf"))


def json_object(example: Mapping[str, Any]) -> Callable[[str], dict[str, Any]]:
    """JSON object; a message shows the ``example``."""

    def read(text: str) -> dict[str, Any]:
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            value = None
        if not isinstance(value, dict):
            shown = json.dumps(example)
            raise argparse.ArgumentTypeError(f"expected a JSON object such as {shown!r}, found {text[:40]!r}")
        return value

    return read


#: Options of a grader as a JSON object.
grader_options = json_object({"factual": {"match": "exact"}})


def checked_by(module: str, check: str, read: Callable[[str], Any] = str) -> Callable[[str], Any]:
    """Value that the function ``check`` of a module of this package accepts, once ``read`` has read it."""

    def checked(text: str) -> Any:
        try:  # --help needs no schema
            return getattr(importlib.import_module(f"coca_mindspeed.{module}"), check)(read(text))
        except (ValueError, CocaError) as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return checked


#: Chat template variables as a JSON object, columns by field of a record and of a prediction, and a date, YYYY-MM-DD.
THINKING_HELP = "a response begins with a thought, and that with the confidence; the answer follows </think>"
template_variables = checked_by("config.values", "template_variables", json_object({"enable_thinking": False}))
columns = checked_by("config.values", "column_names", json_object({"question": "problem", "answer": "solution"}))
prediction_columns = checked_by(
    "evaluation.predictions", "prediction_columns", json_object({"confidence": "p", "correct": "is_right"})
)
day = checked_by("config.values", "template_day")
#: Grader by name, or one's own (``./f.py:name``), with the fingerprint of its file.
grader_option = checked_by("grading.registry", "known_grader")


def device_name(text: str) -> str:
    """Device name; whether the device exists is not checked."""
    from coca_mindspeed.config.schema import DEVICE_PATTERN  # --help needs no schema

    if not re.fullmatch(DEVICE_PATTERN, text):
        raise argparse.ArgumentTypeError(f"expected auto, cpu, cuda, cuda:N, npu or npu:N, found {text[:40]!r}")
    return text
