"""Graders by name, and the choice by record."""

import subprocess
import sys
from pathlib import Path

import pytest

from coca_mindspeed.data.records import Record
from coca_mindspeed.errors import GradingError
from coca_mindspeed.grading.registry import GRADER_NAMES, build_grader, grader_name
from coca_mindspeed.grading.verdict import Outcome


def record(dataset: str = "mine", category: str = "math", answer: str = "", **metadata: object) -> Record:
    return Record("r1", dataset, category, "?", answer, metadata=metadata)


def test_unknown_names_are_refused_with_the_nearest_and_all() -> None:
    with pytest.raises(GradingError) as caught:
        build_grader("maths")
    assert "did you mean 'math'?" in str(caught.value)
    assert all(name in str(caught.value) for name in GRADER_NAMES)
    with pytest.raises(GradingError, match=r"'math' 'second'.*'seconds'"):
        build_grader("math", {"second": 1})
    for bad in ({"workers": 0}, {"seconds": 0.0}):
        with pytest.raises(GradingError, match="found 0"):
            build_grader("math", bad)
    with pytest.raises(GradingError, match="known: none"):
        build_grader("exact", {"strict": True})
    with pytest.raises(GradingError, match=r'"factual": \{"match"'):
        build_grader("auto", {"match": "contains"})


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        (record("gsm8k", "math"), "math"), (record("mbpp_sanitized", "code"), "code"),
        (record("triviaqa", "factual"), "factual"), (record("simpleqa", "factual"), "simpleqa"),
        (record("arithmetic", "math"), "exact"), (record("gsm8k", "math", grader="exact"), "exact"),
    ],
)  # fmt: skip
def test_the_choice_by_record(record: Record, expected: str) -> None:
    assert grader_name(record) == expected


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (record(category="poetry"), "category 'poetry'"),
        (record(grader="maths"), "did you mean 'math'"),
        (record(grader="auto"), "unknown"),
        (record(grader=3), "should be a name"),
        (record("simpleqa", "factual", answer="x"), "judge"),
    ],
)
def test_a_record_whose_grader_cannot_be_made_stops_the_batch_before_anything_is_graded(
    bad: Record, message: str
) -> None:
    grader = build_grader("auto")
    with pytest.raises(GradingError, match=message):
        grader.grade([record("arithmetic", answer="1"), bad], ["1", "1"])
    assert not any(grader.metrics().values())
    grader.close()


def test_mixed_records_are_graded_in_order() -> None:
    records = [
        record("gsm8k", "math", answer="7"),
        record("arithmetic", "math", answer="7"),
        record("triviaqa", "factual", aliases=["Seven"]),
        record("gsm8k", "math", answer="8"),
        record("arithmetic", "math", answer="8"),
    ]
    grader = build_grader("auto", {"math": {"workers": 1, "seconds": 9.0}, "factual": {"match": "contains"}})
    verdicts = grader.grade(records, [r"\boxed{7.0}", "7.0", "It is seven", "8", "8"])
    metrics = grader.metrics()
    grader.close()
    assert [v.outcome for v in verdicts] == [Outcome.RIGHT, Outcome.WRONG, Outcome.RIGHT, Outcome.RIGHT, Outcome.RIGHT]
    assert (metrics["right"], metrics["math/right"], metrics["exact/wrong"]) == (4.0, 2.0, 1.0)


def test_importing_the_registry_is_cheap() -> None:
    code = (
        "import sys, coca_mindspeed.grading.registry as r; r.build_grader('exact'); "
        "print([m for m in ('torch', 'sympy', 'openai', 'transformers') if m in sys.modules])"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
