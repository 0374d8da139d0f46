"""The publishers' own files and solutions, prepared and graded: HumanEval and sanitized MBPP, where they are there."""

import gzip
import json
from collections import Counter

import pytest

from coca_mindspeed.cli import main
from coca_mindspeed.data.published import mbpp_sanitized
from coca_mindspeed.data.records import read_records
from coca_mindspeed.grading.code import CodeGrader
from tests.grading.sandbox_package import needs_sandbox
from tests.shared_data import shared_data

pytestmark = [needs_sandbox, pytest.mark.published]


@pytest.fixture(scope="module")
def grader():
    grader = CodeGrader()  # as runs have it
    yield grader
    grader.close()


def prepared(dataset, path, output):
    """The records that ``coca-mindspeed data prepare`` makes of a publisher's file."""
    assert main(["data", "prepare", dataset, "--input", str(path), "--output", str(output)]) == 0
    return list(read_records(output / "test.jsonl"))


def outcomes(grader, records, answers):
    """How many answers have each outcome, and the reasons of those that are not right."""
    verdicts = grader.grade(records, answers)
    reasons = [f"{record.id}: {v.reason}" for record, v in zip(records, verdicts, strict=True) if not v.correct]
    return Counter(verdict.outcome.value for verdict in verdicts), reasons


def test_humaneval_solutions_are_right_and_empty_ones_wrong(grader, tmp_path):
    path = shared_data("HumanEval.jsonl.gz")
    with gzip.open(path, "rt", encoding="utf-8") as file:
        solutions = {row["task_id"]: row["canonical_solution"] for row in map(json.loads, file)}
    records = prepared("humaneval", path, tmp_path / "humaneval")
    found, reasons = outcomes(grader, records, [solutions[record.id] for record in records])
    assert found == {"right": 164}, reasons
    some = records[::8]
    found, reasons = outcomes(grader, some, ["    return None"] * len(some))
    assert found == {"wrong": len(some)}, reasons


def test_mbpp_solutions_are_right(grader, tmp_path):
    """A third of them: those of its test split as prepared, and the others."""
    path = shared_data("sanitized-mbpp.json")
    rows = json.loads(path.read_text(encoding="utf-8"))
    solutions = {f"mbpp-{row['task_id']}": f"```python\n{row['code']}\n```" for row in rows}
    records = prepared("mbpp_sanitized", path, tmp_path / "mbpp")
    assert len(records) == 257
    test_split = {record.id for record in records}
    every = [mbpp_sanitized(row, number) for number, row in enumerate(rows)]
    records += [record for record in every if record.id not in test_split]
    some = records[::3]
    found, reasons = outcomes(grader, some, [solutions[record.id] for record in some])
    assert found == {"right": len(some)}, reasons
