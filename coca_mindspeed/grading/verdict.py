"""Verdicts, the interfaces of graders, and the simplest grader."""

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol, runtime_checkable

from coca_mindspeed.data.records import Record, RecordError


class Outcome(str, Enum):
    """The grade of an answer.

    ``WRONG`` includes answers that cannot be read or whose comparison exceeds a limit: otherwise a policy could choose
    that outcome. ``UNGRADABLE`` is for faults of the gold answer, the grader or its infrastructure; such answers are
    counted and left out of rewards and metrics.
    """

    RIGHT = "right"
    WRONG = "wrong"
    UNGRADABLE = "ungradable"


@dataclass(frozen=True, slots=True)
class Verdict:
    outcome: Outcome
    reason: str = ""  # always set if ungradable
    seconds: float = 0.0  # wall time of grading; 0 if not measured
    final: bool = False  # data.require_evaluated does not apply

    @property
    def correct(self) -> bool:
        return self.outcome is Outcome.RIGHT

    @property
    def correct_or_none(self) -> bool | None:
        """The ``correct`` field of a prediction: None if ungradable."""
        return None if self.outcome is Outcome.UNGRADABLE else self.correct


class Grader(Protocol):
    """Grades answers. Verdicts come in the order of the answers."""

    def grade(self, records: Sequence[Record], answers: Sequence[str]) -> list[Verdict]:
        """Grade ``answers[i]`` (the answer segment without its confidence) to ``records[i]``."""
        ...

    def close(self) -> None:
        """Release processes and connections; the grader cannot be used afterwards."""
        ...


class MeasuredGrader(Grader, Protocol):
    """A grader with counters and a check of records; all of this package's own are."""

    def check(self, records: Sequence[Record]) -> None:
        """Refuse gold answers that cannot be graded by, without running programs or asking an endpoint.

        Raises:
            RecordError: a record lacks what its answers are graded by.
            GradingError: something that grading needs is missing.
        """
        ...

    def metrics(self) -> dict[str, float]:
        """Totals since the grader was made: answers by outcome, ``seconds``, ``timeouts``, ``restarts``."""
        ...


def refuse_empty(records: Sequence[Record]) -> None:
    """Raise ``RecordError`` for the first blank gold answer."""
    for record in records:
        if not record.answer.strip():
            raise RecordError(record, "the gold answer is empty; correct the record, or take it out")


@runtime_checkable
class Equivalence(Protocol):
    """Compares two answers without a gold answer, for majority voting."""

    def final_answers(self, answers: Sequence[str]) -> list[str | None]:
        """The final answer of each response, or None."""
        ...

    def equivalent(self, pairs: Sequence[tuple[str, str]]) -> list[bool]:
        """Whether the two final answers of each pair are the same; symmetric."""
        ...


class TalliedGrader:
    """Base of the graders: it counts their verdicts, and their timeouts and restarts if they do so in ``_counts``."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._seconds = 0.0

    def grade(self, records: Sequence[Record], answers: Sequence[str]) -> list[Verdict]:
        started = time.perf_counter()
        verdicts = self._grade(records, answers)
        self._seconds += time.perf_counter() - started
        self._counts.update(verdict.outcome.value for verdict in verdicts)
        return verdicts

    def _grade(self, records: Sequence[Record], answers: Sequence[str]) -> list[Verdict]:
        raise NotImplementedError

    def metrics(self) -> dict[str, float]:
        outcomes = {outcome.value: float(self._counts[outcome.value]) for outcome in Outcome}
        others = {name: float(self._counts[name]) for name in ("timeouts", "restarts")}
        return {**outcomes, "seconds": self._seconds, **others}

    def close(self) -> None:
        """Release processes and connections; there are none by default."""


class ExactGrader(TalliedGrader):
    """Right if and only if answer and gold answer are equal after ``strip()`` (synthetic arithmetic)."""

    check = staticmethod(refuse_empty)

    def _grade(self, records: Sequence[Record], answers: Sequence[str]) -> list[Verdict]:
        return [
            Verdict(Outcome.RIGHT if answer.strip() == record.answer.strip() else Outcome.WRONG)
            for record, answer in zip(records, answers, strict=True)
        ]

    def final_answers(self, answers: Sequence[str]) -> list[str | None]:
        return [answer.strip() or None for answer in answers]

    def equivalent(self, pairs: Sequence[tuple[str, str]]) -> list[bool]:
        return [first == second for first, second in pairs]
