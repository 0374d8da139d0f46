"""Estimates of the remaining time."""

import sys
import time
from collections import deque
from collections.abc import Iterable, Mapping

from coca_mindspeed.utils.console import print_text

STEPS = 50  # that an estimate goes by: responses grow and shrink in the course of a training
_EVALUATION = "seconds/evaluation"
_SILENT_SECONDS = 10.0


class Pace:
    """Remaining time of ``total`` steps, with an evaluation every ``interval`` steps (0: none), from recent steps."""

    def __init__(self, total: int, interval: int = 0) -> None:
        self._total, self._interval = total, interval
        self._last: deque[tuple[int, float]] = deque(maxlen=STEPS)
        self._evaluation = 0.0

    @classmethod
    def of_training(cls, total: int, interval: int, timing: Iterable[Mapping[str, float | None]]) -> "Pace":
        """Return the pace by rows of a training run's ``timing.jsonl``, oldest first; earlier ones may be missing."""
        pace = cls(total, interval)
        for row in timing:
            pace.add_training_step(row)
        return pace

    def add(self, steps: int, seconds: float) -> None:
        """Add ``steps`` steps that took ``seconds`` together."""
        self._last.append((steps, seconds))

    def add_training_step(self, timing: Mapping[str, float | None]) -> None:
        """Add a step by its row of ``timing.jsonl``."""
        seconds = {name: value for name, value in timing.items() if name.startswith("seconds/") and value is not None}
        self._evaluation = seconds.pop(_EVALUATION, self._evaluation)
        if seconds:
            self.add(1, sum(seconds.values()))

    def left(self, done: int) -> float | None:
        """Return the seconds left after the first ``done`` steps, evaluations included; None if unknown."""
        steps = sum(steps for steps, _ in self._last)
        if not steps:
            return None
        evaluations = self._total // self._interval - done // self._interval if self._interval else 0
        mean = sum(seconds for _, seconds in self._last) / steps
        return (self._total - done) * mean + evaluations * self._evaluation


class SlowProgress:
    """Prints progress on standard error every ten seconds."""

    def __init__(self, title: str, total: int) -> None:
        self._title, self._total = title, total
        self._started = self._told = time.monotonic()

    def show(self, done: int) -> None:
        now = time.monotonic()
        if now - self._told < _SILENT_SECONDS or done >= self._total:
            return
        self._told = now
        left = duration((now - self._started) / done * (self._total - done)) if done else "some time"
        print_text(f"{self._title}: {done:,} of {self._total:,}, about {left} left", sys.stderr)


def duration(seconds: float) -> str:
    """Format a duration: ``50 s``, ``4 min``, ``2 h 10 min``, ``3 d 4 h``."""
    if seconds < 59.5:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    if minutes < 24 * 60:
        return f"{minutes // 60} h {minutes % 60} min"
    hours = round(seconds / 3600)
    return f"{hours // 24} d {hours % 24} h"
