"""Progress with the time that is left: a live line on a terminal, one line per tenth in a log file."""

import json
import math
import sys
import time
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Column

from coca_mindspeed.utils.console import duration

STEPS = 50  # that an estimate goes by: responses grow and shrink in the course of a training
_EVALUATION = "seconds/evaluation"


class Pace:
    """Remaining time of ``total`` steps, with an evaluation every ``interval`` steps (0: none), from recent steps.

    ``timing`` are rows of a training run's ``timing.jsonl``, oldest first; earlier ones may be missing.
    """

    def __init__(self, total: int, interval: int = 0, timing: Iterable[Mapping[str, float | None]] = ()) -> None:
        self._total, self._interval = total, interval
        self._last: deque[tuple[int, float]] = deque(maxlen=STEPS)
        self._evaluation = 0.0
        for row in timing:
            self.add_training_step(row)

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


_Self = TypeVar("_Self", bound="StepProgress")
_BAR, _WIDE = 24, 80  # columns of the bar, and of a terminal that has room for it
_WRITE_EVERY, _BUSY_EVERY = 1.0, 10.0  # seconds


class StepProgress:
    """Progress over ``total`` steps, ``done`` of them finished already.

    Nothing is shown in the first ``patience`` seconds.  The state is also written to ``file``, for ``coca-mindspeed
    watch``.
    """

    def __init__(
        self,
        total: int,
        enabled: bool,
        done: int = 0,
        *,
        title: str = "working",
        patience: float = 0.0,
        file: Path | None = None,
    ) -> None:
        console = Console(stderr=True)
        self._title, self._total, self._enabled, self._done = title, total, enabled, done
        self._live: Progress | None = None
        if enabled and console.is_terminal:
            text = TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True))
            bar = [BarColumn(_BAR)] if console.width >= _WIDE else []
            self._columns_of_bar = (_BAR + 1) * len(bar)
            self._live = Progress(text, *bar, console=console, refresh_per_second=1)
            self._task = self._live.add_task("", total=total, completed=done)
        self._show_from = time.monotonic() + patience
        self._last_tenth = self._tenth(done)
        self._said = self._since = time.monotonic()
        self._pace = Pace(total)
        self._file, self._write_from = file, 0.0

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, step: int, *parts: str, means: str = "") -> None:
        """Show ``step`` and as many of ``parts``, the most important first, as fit into the terminal.

        ``means`` introduces the parts in a log file.
        """
        now = time.monotonic()
        if step > self._done:
            self._pace.add(step - self._done, now - self._since)
            self._done, self._since = step, now
        # rich's own estimate only remembers half a minute, less than one step of a large model.
        left = self._pace.left(step) if step < self._total else None
        if self._file is not None and (now >= self._write_from or step >= self._total):
            self._write_from = now + _WRITE_EVERY
            state = {"title": self._title.strip(), "step": step, "total": self._total, "left": left}
            with suppress(OSError):  # of a full disk; the phase's own files will report it
                self._file.write_text(json.dumps(state), encoding="utf-8")
        if now < self._show_from:
            return
        title = f"{self._title} {step}/{self._total}"
        about = [] if left is None else [f"about {duration(left)} left"]
        if self._live is not None:
            self._update(title, *parts, *about)
        elif self._enabled and self._tenth(step) > self._last_tenth:
            self._last_tenth, self._said = self._tenth(step), now
            shown = [title, *about, means + "  ".join(parts)]
            print("  ".join(filter(None, shown)), file=sys.stderr, flush=True)

    def busy(self, text: str) -> None:
        """Show the state of a long step; in a log file at most every ten seconds."""
        if self._live is not None:
            self._update(f"{self._title} {text}")
        elif self._enabled and time.monotonic() >= self._said + _BUSY_EVERY:
            self._said = time.monotonic()
            print(f"{self._title} {text}", file=sys.stderr, flush=True)

    def note(self, text: str) -> None:
        """Print a line above the bar, never wrapped or cut."""
        if self._live is not None:
            self._live.console.print(text, soft_wrap=True, markup=False, highlight=False)
        else:
            print(text, file=sys.stderr, flush=True)

    def _update(self, *parts: str) -> None:
        """Show the first of the parts that fit into the line."""
        assert self._live is not None
        shown, room = list(parts), self._live.console.width - self._columns_of_bar
        while len(shown) > 1 and len(" ".join(shown)) > room:
            shown.pop()
        self._live.update(self._task, description=" ".join(shown), completed=self._done)
        self._live.start()

    def _tenth(self, step: int) -> int:
        return step * 10 // max(1, self._total)


# The most important first.
_NUMBERS = {
    "rollout/accuracy": "accuracy {:.3f}",
    "rollout/ece": "ECE {:.3f}",
    "reward/confidence": "confidence reward {:.3f}",
    "tokens_per_second/rollout": "tokens/s {:,.0f}",
}


class TrainingProgress(StepProgress):
    """Progress of a training with an evaluation every ``interval`` steps (0: none); means over the last steps.

    ``hidden`` names metrics that are not shown.
    """

    def __init__(
        self, total: int, enabled: bool, done: int = 0, *, interval: int = 0, hidden: Collection[str] = ()
    ) -> None:
        super().__init__(total, enabled, done, title="training")
        self._shown = {key: text for key, text in _NUMBERS.items() if key not in hidden}
        self._pace = Pace(total, interval)
        self._rows: deque[Mapping[str, float]] = deque(maxlen=10)

    def advance(self, step: int, metrics: Mapping[str, float], timing: Mapping[str, float]) -> None:
        self._rows.append({**metrics, **timing})
        self._pace.add_training_step(timing)
        self._done = step  # the pace is that of the timing row, evaluations apart
        parts = []
        for key, text in self._shown.items():
            if known := [row[key] for row in self._rows if math.isfinite(row.get(key, math.nan))]:
                parts.append(text.format(sum(known) / len(known)))
        steps = len(self._rows)
        self.show(step, *parts, means=f"mean of {steps} steps: " if steps > 1 else "")
