"""Exact match after stripping white space: for data whose answers have one spelling, such as the embedded task."""

from collections.abc import Sequence

from coca_mindspeed.data.records import Record
from coca_mindspeed.grading.verdict import Outcome, Verdict


class ExactGrader:
    """Right if and only if the stripped answer is the stripped gold answer, character for character."""

    def grade(self, records: Sequence[Record], answers: Sequence[str]) -> list[Verdict]:
        return [
            Verdict(Outcome.RIGHT if answer.strip() == record.answer.strip() else Outcome.WRONG)
            for record, answer in zip(records, answers, strict=True)
        ]

    def close(self) -> None:
        """Nothing is held."""
