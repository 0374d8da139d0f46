"""Progress bars with ETA: a live line on a terminal, in a log file one line per tenth."""

import json
import sys
import time
from collections import deque
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from coca_mindspeed.utils.console import duration

STEPS = 50  # that an estimate goes by: responses grow and shrink in the course of a training
_EVALUATION = "seconds/evaluation"


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


_Self = TypeVar("_Self", bound="StepProgress")
_BAR = 24  # characters
_WRITE_EVERY = 1.0  # seconds


class StepProgress:
    """Progress over a known number of steps; nothing is shown before the block is entered."""

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
        """``done`` steps are finished already; nothing is shown in the first ``patience`` seconds.

        The state is also written to ``file``, for ``coca-mindspeed watch``.
        """
        console = Console(stderr=True)
        self._title, self._total, self._enabled = title, total, enabled
        self._live = Live(console=console, refresh_per_second=1) if enabled and console.is_terminal else None
        self._show_from = time.monotonic() + patience
        self._last_tenth = self._tenth(done)
        self._said = self._since = time.monotonic()
        self._done = done
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
            with suppress(OSError):  # of a full disk; the stage's own files will report it
                self._file.write_text(json.dumps(state), encoding="utf-8")
        if now < self._show_from:
            return
        about = [] if left is None else [f"about {duration(left)} left"]
        if self._live is not None:
            self._update(f"{self._title} {step}/{self._total}", *parts, *about)
        elif self._enabled and self._tenth(step) > self._last_tenth:
            self._last_tenth, self._said = self._tenth(step), now
            shown = [f"{self._title} {step}/{self._total}", *about, means + "  ".join(parts)]
            print("  ".join(filter(None, shown)), file=sys.stderr, flush=True)

    def busy(self, text: str) -> None:
        """Show the state of a long step; in a log file at most every ten seconds."""
        if self._live is not None:
            self._update(f"{self._title} {text}")
        elif self._enabled and time.monotonic() >= self._said + 10:
            self._said = time.monotonic()
            print(f"{self._title} {text}", file=sys.stderr, flush=True)

    def note(self, text: str) -> None:
        """Print a line above the bar, never wrapped or cut."""
        if self._live is not None:
            self._live.console.print(text, soft_wrap=True, markup=False, highlight=False)
        else:
            print(text, file=sys.stderr, flush=True)

    def _update(self, *parts: str) -> None:
        """Replace the line of the terminal by the first of the parts that fit, and a bar if there is room."""
        assert self._live is not None
        shown, width = list(parts), self._live.console.width
        while len(shown) > 1 and len(" ".join(shown)) > width:
            shown.pop()
        text, line = " ".join(shown), Table.grid(padding=(0, 1))
        bar = [ProgressBar(max(1, self._total), self._done, width=_BAR)] if len(text) + 1 + _BAR <= width else []
        line.add_row(Text(text, no_wrap=True, overflow="crop"), *bar)
        self._live.update(line)
        self._live.start()

    def _tenth(self, step: int) -> int:
        return step * 10 // max(1, self._total)
