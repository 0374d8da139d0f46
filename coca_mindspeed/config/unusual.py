"""Warnings about values that hardly any run means; the run may start."""

from collections.abc import Iterator, Mapping
from typing import Any

from coca_mindspeed.config.requirements import is_number
from coca_mindspeed.errors import Problem, show_value

_FACTOR = 10.0
#: Setting -> its value in the ready-made runs; a learning rate of LoRA is another one.
_USUAL = {"lr": 1e-6, "grad_clip": 1.0, "clip": 0.2}
_LORA_LR = 1e-4
_LARGEST_DECAY, _SMALLEST_BETA, _SMALLEST_SECONDS = 0.1, 0.5, 0.1


def unusual_values(values: Mapping[str, Any], keys: Mapping[str, str], *, lora: bool = False) -> Iterator[Problem]:
    """Warnings about ``lr``, ``grad_clip``, ``clip``, ``weight_decay``, ``betas`` and a grader's ``seconds``.

    ``keys`` names them in the run's file; a value that is no number is left out.
    """
    usual = _USUAL | ({"lr": _LORA_LR} if lora else {})
    for name, value in usual.items():
        if is_number(found := values.get(name)) and not 0.999 * value / _FACTOR <= found <= 1.001 * value * _FACTOR:
            where = "a run with LoRA" if lora and name == "lr" else "the ready-made runs"
            reason = f"is more than {_FACTOR:g} times off {show_value(value)}, the value of {where}"
            yield Problem("unusual-value", keys[name], found, reason)
    if is_number(decay := values.get("weight_decay")) and decay > _LARGEST_DECAY:
        reason = f"is above {_LARGEST_DECAY}; the ready-made runs have 0.0"
        yield Problem("unusual-value", keys["weight_decay"], decay, reason)
    betas = list(values.get("betas") or ())
    if any(is_number(beta) and beta < _SMALLEST_BETA for beta in betas):
        reason = f"below {_SMALLEST_BETA} AdamW follows the noise of steps; the ready-made runs have [0.9, 0.999]"
        yield Problem("unusual-value", keys["betas"], betas, reason)
    if is_number(seconds := values.get("seconds")) and seconds < _SMALLEST_SECONDS:
        reason = f"leaves a grader less than {_SMALLEST_SECONDS} seconds for an answer: right ones would be ungradable"
        yield Problem("unusual-value", keys["seconds"], seconds, reason)


def late_checkpoint(key: str, interval: Any, steps: int | None) -> Iterator[Problem]:
    """The warning of a run that writes no checkpoint before its end."""
    if is_number(interval) and steps is not None and interval >= steps > 2:  # a trial has two
        reason = f"no checkpoint is written before the end of the {steps} steps: a run that stops before starts over"
        yield Problem("no-checkpoint", key, interval, reason, "save more often")
