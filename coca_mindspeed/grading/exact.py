"""Exact match of stripped text, for data whose answers have one spelling (synthetic arithmetic)."""

import time
from collections.abc import Sequence

from coca_mindspeed.data.records import Record
from coca_mindspeed.grading.verdict import Outcome, Tally, Verdict, refuse_empty


class ExactGrader:
    """Right if and only if answer and gold answer are equal after ``strip()``."""

    def __init__(self) -> None:
        self._tally = Tally()

    @staticmethod
    def check(records: Sequence[Record]) -> None:
        refuse_empty(records)

    def grade(self, records: Sequence[Record], answers: Sequence[str]) -> list[Verdict]:
        started = time.perf_counter()
        verdicts = [
            Verdict(Outcome.RIGHT if answer.strip() == record.answer.strip() else Outcome.WRONG)
            for record, answer in zip(records, answers, strict=True)
        ]
        self._tally.add(verdicts, time.perf_counter() - started)
        return verdicts

    def final_answers(self, answers: Sequence[str]) -> list[str | None]:
        return [answer.strip() or None for answer in answers]

    def equivalent(self, pairs: Sequence[tuple[str, str]]) -> list[bool]:
        return [first == second for first, second in pairs]

    def metrics(self) -> dict[str, float]:
        return self._tally.metrics()

    def close(self) -> None:
        """Hold no resources."""
