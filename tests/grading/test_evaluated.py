"""Answers that restate the question or leave the work undone earn nothing in training."""

import re

import pytest

from coca_mindspeed.data.records import Record
from coca_mindspeed.grading.math.grader import MathGrader
from coca_mindspeed.grading.unevaluated import reject_unevaluated, why_unevaluated
from coca_mindspeed.grading.verdict import Outcome, Verdict
from tests.grading.tables import read_table

CASES = read_table("unevaluated.tsv")


@pytest.mark.parametrize(("question", "gold", "answer", "evaluated"), CASES)
def test_the_table_of_unevaluated_answers(question: str, gold: str, answer: str, evaluated: str) -> None:
    assert (why_unevaluated(question, gold, rf"So \boxed{{{answer}}}.") == "") is (evaluated == "true")
    assert why_unevaluated(f"Find ${gold}$.", gold, rf"\boxed{{{gold}}}") == ""


def record(question: str, gold: str, category: str = "math", **metadata: object) -> Record:
    return Record("r1", "mine", category, question, gold, metadata=metadata)


def test_only_mathematics_is_looked_at() -> None:
    records = [
        record("17*23", "391"),
        record("17*23", "391", grader="factual"),
        record("17*23", "391", category="code"),
        record("17*23", "391", category="other", grader="math"),
    ]
    verdicts = reject_unevaluated(records, [r"\boxed{17*23}"] * 4, [Verdict(Outcome.RIGHT)] * 4)
    assert [verdict.correct for verdict in verdicts] == [False, True, True, False]
    assert "arithmetic" in verdicts[0].reason


def test_by_value_an_unevaluated_answer_is_right_and_in_training_it_is_not() -> None:
    by_value = MathGrader(seconds=60.0, workers=1)
    unread = re.compile(r"\\(?:sum|int|lim|gcd)|!!")  # no final answers by value either
    cases = [case for case in CASES if case[0].startswith("Compute ") and not unread.search(case[2])]
    records = [record(question, gold) for question, gold, _, _ in cases]
    answers = [rf"\boxed{{{answer}}}" for _, _, answer, _ in cases]
    verdicts = by_value.grade(records, answers)
    assert [v.correct for v in verdicts] == [True] * len(cases)
    found = [v.correct for v in reject_unevaluated(records, answers, verdicts)]
    assert found == [evaluated == "true" for _, _, _, evaluated in cases]
    by_value.close()
