"""What a grader says, and what every grader looks like."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol, runtime_checkable

from coca_mindspeed.data.records import Record, RecordError


class Outcome(str, Enum):
    """The grade of an answer.

    ``wrong`` is also an answer that cannot be read, or whose comparison exceeds a limit: a policy could hide behind any
    other outcome.  ``ungradable`` is for faults that are not the answer's: of the gold answer, the grader, or what the
    grader needs.  An ungradable answer is neither right nor wrong, and is left out of rewards and metrics, and counted.
    """

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

    @property
    def correct_or_none(self) -> bool | None:
        """As a prediction says it: None where ungradable."""
        return None if self.outcome is Outcome.UNGRADABLE else self.correct


class Grader(Protocol):
    """Grades answers of one kind of data set.  Verdicts come in the order of the answers."""

    def grade(self, records: Sequence[Record], answers: Sequence[str]) -> list[Verdict]:
        """Grade ``answers[i]`` (the answer segment, confidence removed) to ``records[i]``."""
        ...

    def close(self) -> None:
        """Release processes and connections; the grader is not used afterwards."""
        ...


class MeasuredGrader(Grader, Protocol):
    """A grader that counts what it does, and says beforehand what it cannot grade; all of this package's own are."""

    def check(self, records: Sequence[Record]) -> None:
        """Refuse gold answers that no answer can be graded by, without running a program or asking an endpoint.

        Raises:
            RecordError: a record lacks what its answers are graded by.
            GradingError: something that grading needs is missing.
        """
        ...

    def metrics(self) -> dict[str, float]:
        """Totals since the grader was made: answers by outcome, ``seconds``, ``timeouts``, ``restarts``."""
        ...


def refuse_empty(records: Sequence[Record]) -> None:
    """Refuse gold answers of nothing but white space.

    Raises:
        RecordError: of the first.
    """
    for record in records:
        if not record.answer.strip():
            raise RecordError(record, "the gold answer is empty; correct the record, or take it out")


@runtime_checkable
class Equivalence(Protocol):
    """Whether two answers mean the same, without a gold one: what majority voting clusters by."""

    def final_answers(self, answers: Sequence[str]) -> list[str | None]:
        """The final answer of each response; None where it gives none."""
        ...

    def equivalent(self, pairs: Sequence[tuple[str, str]]) -> list[bool]:
        """For each pair of final answers, whether they are the same; the order within a pair does not matter."""
        ...


@dataclass(slots=True)
class Tally:
    """Running totals of a grader's verdicts."""

    seconds: float = 0.0
    timeouts: int = 0
    restarts: int = 0
    outcomes: dict[Outcome, int] = field(default_factory=lambda: dict.fromkeys(Outcome, 0))

    def add(self, verdicts: Iterable[Verdict], seconds: float) -> None:
        self.seconds += seconds
        for verdict in verdicts:
            self.outcomes[verdict.outcome] += 1

    def metrics(self) -> dict[str, float]:
        counts = {outcome.value: float(count) for outcome, count in self.outcomes.items()}
        return {
            **counts,
            "seconds": self.seconds,
            "timeouts": float(self.timeouts),
            "restarts": float(self.restarts),
        }
