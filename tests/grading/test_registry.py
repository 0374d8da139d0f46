"""Graders by name, and the choice by record."""

import subprocess
import sys
from pathlib import Path

import pytest

from coca_mindspeed.data.records import Record
from coca_mindspeed.errors import GradingError
from coca_mindspeed.grading.registry import build_grader, grader_name
from coca_mindspeed.grading.verdict import Outcome


def record(dataset="mine", category="math", answer="", **metadata):
    return Record("r1", dataset, category, "?", answer, metadata=metadata)


@pytest.mark.parametrize(
    ("name", "options", "named"),
    [
        ("maths", {}, "'math'"),
        ("math", {"second": 1}, "'seconds'"),
        ("math", {"workers": 0}, "found 0"),
        ("math", {"seconds": 0.0}, "found 0"),
        ("exact", {"strict": True}, "strict"),
        ("auto", {"match": "contains"}, '"factual"'),
    ],
)
def test_unknown_names_and_options_are_refused(name, options, named):
    with pytest.raises(GradingError, match=named):
        build_grader(name, options)


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        (record("gsm8k", "math"), "math"), (record("mbpp_sanitized", "code"), "code"),
        (record("triviaqa", "factual"), "factual"), (record("simpleqa", "factual"), "simpleqa"),
        (record("arithmetic", "math"), "exact"), (record("gsm8k", "math", grader="exact"), "exact"),
    ],
)  # fmt: skip
def test_the_choice_by_record(record, expected):
    assert grader_name(record) == expected


@pytest.mark.parametrize(
    "bad",
    [record(category="poetry"), record(grader="maths"), record(grader=3), record("simpleqa", "factual", answer="x")],
)
def test_a_record_without_a_grader_stops_the_batch_first(bad):
    grader = build_grader("auto")
    with pytest.raises(GradingError):
        grader.grade([record("arithmetic", answer="1"), bad], ["1", "1"])
    assert not any(grader.metrics().values())
    grader.close()


def test_mixed_records_are_graded_in_order():
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


def test_importing_the_registry_is_cheap():
    code = (
        "import sys, coca_mindspeed.grading.registry as r; r.build_grader('exact'); "
        "print([m for m in ('torch', 'sympy', 'openai', 'transformers') if m in sys.modules])"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
