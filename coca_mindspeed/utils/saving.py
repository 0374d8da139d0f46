"""When a training saves beside its interval: by the clock, and where it is asked to stop between two steps.

A launcher and its training are different processes, perhaps on different nodes: the file :data:`STOP` in the output
directory asks, and the training answers in it with the step after which it has stopped.
"""

import time
from dataclasses import dataclass
from pathlib import Path

from coca_mindspeed.utils.files import write_atomically

STOP = "stop"


class CheckpointTimer:
    """Tells whether a checkpoint is due by the clock; ``minutes`` None: never.

    Attributes:
        step: the newest step that is saved.
    """

    def __init__(self, minutes: float | None, step: int = 0) -> None:
        self._seconds = float("inf") if minutes is None else 60 * minutes
        self.saved(step)

    def saved(self, step: int) -> None:
        """Remember that ``step`` is saved, now."""
        self.step, self._at = step, time.monotonic()

    def is_due(self, step: int) -> bool:
        """Whether ``step`` is not saved, and the last checkpoint is so many minutes old."""
        return step > self.step and time.monotonic() - self._at >= self._seconds


@dataclass(frozen=True)
class StopRequest:
    """The file by which a training is asked to stop; None: nobody can ask."""

    path: Path | None

    @classmethod
    def of(cls, output: Path) -> "StopRequest":
        """The request to the run in an output directory."""
        return cls(output / STOP)

    def ask(self) -> None:
        """Ask the training to save and stop after its step."""
        if self.path is not None:
            self.path.touch()

    def is_asked(self) -> bool:
        return self.path is not None and self.path.exists()

    def answer(self, step: int) -> None:
        """Tell that the training stops after ``step``, which is saved unless it is 0."""
        if self.path is not None:
            write_atomically(self.path, f"{step}\n")

    def answered(self) -> int | None:
        """The step after which the training has stopped; None if it has not."""
        text = self.path.read_text(encoding="utf-8").strip() if self.path is not None and self.path.exists() else ""
        return int(text) if text.isdecimal() else None

    def withdraw(self) -> None:
        if self.path is not None:
            self.path.unlink(missing_ok=True)
