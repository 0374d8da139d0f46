"""Warnings about values that hardly any run means; the run may start."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from coca_mindspeed.config.requirements import is_number
from coca_mindspeed.errors import Problem, show_value

_FACTOR = 10.0
#: Setting -> its value in the ready-made runs; a learning rate of LoRA is another one.
_USUAL = {"lr": 1e-6, "grad_clip": 1.0, "clip": 0.2}
_LORA_LR = 1e-4
#: Setting -> its smallest and largest value, and why others are hardly meant.
_BOUNDS = {
    "weight_decay": (0.0, 0.1, "the ready-made runs have 0.0"),
    "betas": (0.5, 1.0, "AdamW follows the noise of steps; the ready-made runs have [0.9, 0.999]"),
    "seconds": (0.1, math.inf, "a grader has less time for an answer: right ones would be ungradable"),
    "is_threshold": (1.0, math.inf, "it scales the loss of tokens on which both engines agree; 2 is usual"),
    "max_new_tokens": (128, math.inf, "longer responses are cut off; the ready-made runs have 4,096"),
}


def unusual_values(settings: Mapping[str, tuple[str, Any]], *, lora: bool = False) -> Iterator[Problem]:
    """Warnings about settings of ``_USUAL`` and ``_BOUNDS``, each with its key in the run's file and its value.

    A value that is no number is left out.
    """
    usual = _USUAL | ({"lr": _LORA_LR} if lora else {})
    for name, value in usual.items():
        key, found = settings[name]
        if is_number(found) and not 0.999 * value / _FACTOR <= found <= 1.001 * value * _FACTOR:
            where = "a run with LoRA" if lora and name == "lr" else "the ready-made runs"
            reason = f"is more than {_FACTOR:g} times off {show_value(value)}, the value of {where}"
            yield Problem("unusual-value", key, found, reason)
    for name, (least, most, reason) in _BOUNDS.items():
        key, value = settings[name]
        numbers = list(filter(is_number, [value] if is_number(value) else value or ()))
        if any(number < least for number in numbers):
            yield Problem("unusual-value", key, value, f"below {least:g}, {reason}")
        elif any(number > most for number in numbers):
            yield Problem("unusual-value", key, value, f"is above {most:g}; {reason}")


def late_checkpoint(key: str, interval: Any, steps: int | None) -> Iterator[Problem]:
    """The warning of a run that writes no checkpoint before its end."""
    if is_number(interval) and steps is not None and interval >= steps > 2:  # a trial has two
        reason = f"no checkpoint is written before the end of the {steps} steps: a run that stops before starts over"
        yield Problem("no-checkpoint", key, interval, reason, "save more often")
