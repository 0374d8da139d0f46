"""Progress bars: on a terminal a live line, elsewhere (a log file) a line every tenth of the way."""

import math
import sys
from collections.abc import Mapping
from types import TracebackType
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

_Self = TypeVar("_Self", bound="StepProgress")
_SMOOTHING = 0.1  # weight of the newest step in the shown averages


class StepProgress:
    """Progress over a known number of steps, with a text that changes."""

    title = "working"

    def __init__(self, total: int, enabled: bool, done: int = 0) -> None:
        console = Console(stderr=True)
        self._total = total
        self._live = enabled and console.is_terminal
        self._lines = enabled and not console.is_terminal
        self._bar = Progress(
            TextColumn(self.title),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[shown]}"),
            console=console,
            disable=not self._live,
        )
        self._task = self._bar.add_task(self.title, total=total, completed=done, shown="")

    def __enter__(self: _Self) -> _Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def show(self, step: int, text: str) -> None:
        """Show that ``step`` steps are done."""
        if self._live:
            self._bar.update(self._task, completed=step, shown=text)
        elif self._lines and step * 10 // self._total > (step - 1) * 10 // self._total:
            print(f"{self.title} {step}/{self._total}  {text}", file=sys.stderr, flush=True)


class WarmUpProgress(StepProgress):
    """Progress of the supervised warm-up."""

    title = "warm-up "

    def advance(self, step: int, loss: float) -> None:
        """Show the loss of the newest step, in nats a token."""
        self.show(step, f"loss {loss:.3f}")


class TrainingProgress(StepProgress):
    """Progress of the training: reward, accuracy, ECE (running averages over about ten steps) and tokens/s."""

    title = "training"

    def __init__(self, total: int, enabled: bool, done: int = 0) -> None:
        super().__init__(total, enabled, done)
        self._averages: dict[str, float] = {}

    def advance(self, step: int, metrics: Mapping[str, float], timing: Mapping[str, float]) -> None:
        """Show the averages up to the newest step."""
        newest = {
            "confidence reward": metrics["reward/confidence"],
            "accuracy": metrics["rollout/accuracy"],
            "ECE": metrics["rollout/ece"],
            "tokens/s": timing["tokens_per_second/rollout"],
        }
        for name, value in newest.items():
            if math.isfinite(value):
                before = self._averages.get(name, value)
                self._averages[name] = before + _SMOOTHING * (value - before)
        self.show(
            step,
            "  ".join(
                f"{name} {value:,.0f}" if name == "tokens/s" else f"{name} {value:.3f}"
                for name, value in self._averages.items()
            ),
        )
