"""Warnings about values that hardly any run means, and about records that do not fit."""

import pytest

from coca_mindspeed.config.unusual import late_checkpoint, unusual_values
from coca_mindspeed.data.arithmetic import arithmetic_records
from coca_mindspeed.data.flaws import record_flaws
from coca_mindspeed.data.records import Record

USUAL = {"lr": 1e-6, "grad_clip": 1.0, "clip": 0.2, "weight_decay": 0.01, "betas": (0.9, 0.95), "seconds": None}
USUAL |= {"is_threshold": 2.0, "max_new_tokens": 4096}


@pytest.mark.parametrize(
    ("changes", "lora", "names"),
    [
        ({}, False, []),
        ({"lr": 1e-5, "grad_clip": 0.1}, False, []),
        ({"lr": 1e-3}, False, ["lr"]),
        ({"lr": 1e-12, "grad_clip": 1e9, "clip": 0.0}, False, ["lr", "grad_clip", "clip"]),
        ({"lr": 0}, False, ["lr"]),
        ({"lr": 1e-6}, True, ["lr"]),
        ({"lr": 2e-5}, True, []),
        ({"weight_decay": 10, "betas": [0, 0], "seconds": 0.001}, False, ["weight_decay", "betas", "seconds"]),
        ({"grad_clip": None, "betas": None, "is_threshold": None}, False, []),
        ({"is_threshold": 0.01, "max_new_tokens": 64}, False, ["is_threshold", "max_new_tokens"]),
        ({"is_threshold": 1.0, "max_new_tokens": 128}, False, []),
    ],
)
def test_unusual_values(changes, lora, names):
    settings = {name: (f"section.{name}", value) for name, value in (USUAL | changes).items()}
    problems = list(unusual_values(settings, lora=lora))
    assert [problem.key for problem in problems] == [f"section.{name}" for name in names]
    assert {problem.code for problem in problems} <= {"unusual-value"}


@pytest.mark.parametrize(("interval", "steps", "warned"), [(50, 200, 0), (200, 200, 1), (1000, 200, 1), (50, None, 0)])
def test_a_late_checkpoint(interval, steps, warned):
    assert len(list(late_checkpoint("checkpoint.interval", interval, steps))) == warned


def _records(pairs, category="math"):
    rows = enumerate(pairs)
    return [Record(id=str(i), dataset="d", question=q, answer=a, category=category) for i, (q, a) in rows]


@pytest.mark.parametrize(
    ("pairs", "grader", "codes"),
    [
        ([(f"q{i}", str(i)) for i in range(20)], "math", []),
        ([("q", "1"), ("q", "2"), ("r", "3")], "auto", ["gold-contradicts"]),
        ([(f"q{i}", "8") for i in range(20)], "math", ["gold-same"]),
        ([(f"q{i}", "8") for i in range(5)], "math", []),
        ([(f"Put it into \\boxed{{}}: {i}", str(i)) for i in range(3)], "auto", ["question-form"]),
        ([(f"<answer> {i}", str(i)) for i in range(3)], "auto", ["question-form"]),
        ([(f"q{i}", name) for i, name in enumerate(("Athens", "Max Planck"))], "math", ["grader-misfit"]),
        ([(f"q{i}", name) for i, name in enumerate(("Athens", "Max Planck"))], "auto", []),
        ([(f"q{i}", r"\\frac{1}{2}" + str(i)) for i in range(3)], "exact", ["grader-misfit"]),
    ],
)
def test_flaws_of_records(pairs, grader, codes):
    assert [code for code, *_ in record_flaws(_records(pairs), grader)] == codes


def test_records_that_name_their_grader_fit_it():
    records = arithmetic_records(100, "train", seed=0)  # those of the demo
    assert record_flaws(records, "exact") == ()
    assert [code for code, *_ in record_flaws(records, "factual")] == ["grader-misfit"]
