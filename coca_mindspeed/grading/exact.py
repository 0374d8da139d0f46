"""Exact match of stripped text, for data whose answers have one spelling (synthetic arithmetic)."""

from collections.abc import Sequence

from coca_mindspeed.data.records import Record
from coca_mindspeed.grading.verdict import Outcome, TalliedGrader, Verdict, refuse_empty


class ExactGrader(TalliedGrader):
    """Right if and only if answer and gold answer are equal after ``strip()``."""

    @staticmethod
    def check(records: Sequence[Record]) -> None:
        refuse_empty(records)

    def _grade(self, records: Sequence[Record], answers: Sequence[str]) -> list[Verdict]:
        return [
            Verdict(Outcome.RIGHT if answer.strip() == record.answer.strip() else Outcome.WRONG)
            for record, answer in zip(records, answers, strict=True)
        ]

    def final_answers(self, answers: Sequence[str]) -> list[str | None]:
        return [answer.strip() or None for answer in answers]

    def equivalent(self, pairs: Sequence[tuple[str, str]]) -> list[bool]:
        return [first == second for first, second in pairs]
