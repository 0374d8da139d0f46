"""What a grader says, and what every grader looks like."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from coca_mindspeed.data.records import Record


class Outcome(str, Enum):
    """A verdict is one of three; ``ungradable`` earns no reward but is counted, with its reason."""

    RIGHT = "right"
    WRONG = "wrong"
    UNGRADABLE = "ungradable"


@dataclass(frozen=True, slots=True)
class Verdict:
    """One answer's grade.

    Attributes:
        outcome: right, wrong or ungradable.
        reason: why, for people: always set when ungradable.
        seconds: wall time that grading took, 0 where it was not measured.
    """

    outcome: Outcome
    reason: str = ""
    seconds: float = 0.0

    @property
    def correct(self) -> bool:
        return self.outcome is Outcome.RIGHT


class Grader(Protocol):
    """Grades answers of one kind of data set.  Verdicts come in the order of the answers."""

    def grade(self, records: Sequence[Record], answers: Sequence[str]) -> list[Verdict]:
        """Grade ``answers[i]`` (the answer segment, confidence removed) to ``records[i]``."""
        ...

    def close(self) -> None:
        """Release processes and connections; the grader is not used afterwards."""
        ...
