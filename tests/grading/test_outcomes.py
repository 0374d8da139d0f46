"""Tests of the outcomes: no answer can make itself ungradable, and no fault of the gold makes an answer wrong."""

import pytest

from coca_mindspeed.data.records import Record
from coca_mindspeed.grading.factual import FactualGrader
from coca_mindspeed.grading.math.grader import MathGrader
from coca_mindspeed.grading.verdict import ExactGrader, Outcome
from coca_mindspeed.grading.workers import Failure, TaskResult
from coca_sandbox.sandbox import Sandbox

WRONG, UNGRADABLE = Outcome.WRONG, Outcome.UNGRADABLE


def record(gold, category="math", **metadata):
    return Record(id="r", dataset="d", category=category, question="?", answer=gold, metadata=metadata)


@pytest.mark.parametrize("failure", list(Failure))
@pytest.mark.parametrize("gold_fails", [False, True])
def test_a_comparison_that_fails(monkeypatch, failure, gold_fails):
    """Of the machine's own failures, none is an answer's."""
    grader = MathGrader(workers=1)

    def compared(_, pairs):
        for gold, answer in pairs:
            failed = answer != gold or gold_fails
            yield TaskResult(None, failure) if failed else TaskResult((Outcome.RIGHT, ""))

    monkeypatch.setattr(grader._workers, "map", compared)
    own = failure in (Failure.TIMEOUT, Failure.DIED, Failure.RAISED)
    expected = WRONG if own and not gold_fails else UNGRADABLE
    assert grader.grade([record(r"\sqrt{2}x")], [r"\boxed{\sqrt{3}x}"])[0].outcome is expected
    grader.close()


def test_a_program_that_takes_away_its_own_directory_is_wrong(monkeypatch):
    """The next case cannot start then, which without a sandbox a program can bring about."""
    monkeypatch.setattr("shutil.which", lambda name: None)
    sandbox = Sandbox(allow_unsandboxed=True)
    program = "import os, shutil\nshutil.rmtree(os.path.dirname(__file__))\nprint(input())"
    job = {"kind": "stdio", "cases": [{"input": "1", "output": "1"}] * 2, "source": program, "seconds": 10.0}
    report = sandbox.run(job, total_seconds=10.0)
    assert report.outcome == "wrong", report.reason


@pytest.mark.parametrize("answer", ["", "\n\n", r"\boxed{Par", "x" * 100_000, "\ud800", "no " * 10_000])
def test_facts_and_spellings_are_right_or_wrong(answer):
    assert FactualGrader().grade([record("Paris", "factual", aliases=["Paris"])], [answer])[0].outcome is WRONG
    assert ExactGrader().grade([record("Paris")], [answer])[0].outcome is WRONG
