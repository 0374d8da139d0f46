"""Tests of the outcomes: no answer can make itself ungradable, and no fault of the gold makes an answer wrong."""

from collections.abc import Iterator
from typing import Any

import pytest

from coca_mindspeed.data.records import Record
from coca_mindspeed.grading.code.grader import CodeGrader
from coca_mindspeed.grading.code.sandbox import Sandbox
from coca_mindspeed.grading.exact import ExactGrader
from coca_mindspeed.grading.factual import FactualGrader
from coca_mindspeed.grading.math.grader import MathGrader
from coca_mindspeed.grading.verdict import Outcome
from coca_mindspeed.grading.workers import Failure, TaskResult
from tests.grading.sandbox_package import needs_sandbox

WRONG, UNGRADABLE = Outcome.WRONG, Outcome.UNGRADABLE


def record(gold: str, category: str = "math", **metadata: Any) -> Record:
    return Record(id="r", dataset="d", category=category, question="?", answer=gold, metadata=metadata)


@pytest.mark.parametrize("failure", list(Failure))
@pytest.mark.parametrize("gold_fails", [False, True])
def test_a_comparison_that_fails(monkeypatch: pytest.MonkeyPatch, failure: Failure, gold_fails: bool) -> None:
    """Of the machine's own failures, none is an answer's."""
    grader = MathGrader(workers=1)

    def compared(_: Any, pairs: Any) -> Any:
        for gold, answer in pairs:
            failed = answer != gold or gold_fails
            yield TaskResult(None, failure) if failed else TaskResult((Outcome.RIGHT, ""))

    monkeypatch.setattr(grader._workers, "map", compared)
    own = failure in (Failure.TIMEOUT, Failure.DIED, Failure.RAISED)
    expected = WRONG if own and not gold_fails else UNGRADABLE
    assert grader.grade([record(r"\sqrt{2}x")], [r"\boxed{\sqrt{3}x}"])[0].outcome is expected
    grader.close()


@pytest.fixture(scope="module")
def code() -> Iterator[CodeGrader]:
    grader = CodeGrader(seconds=3.0, total_seconds=6.0, workers=1)
    yield grader
    grader.close()


ADD = {"kind": "asserts", "code": "assert add(1, 2) == 3", "entry_point": "add"}
NO_SUCH_MODULE = {"kind": "asserts", "code": "import no_such_module\nassert add(1, 2) == 3", "entry_point": "add"}
ECHO = {"kind": "stdio", "cases": [{"input": "1", "output": "1"}] * 2}


@needs_sandbox
@pytest.mark.parametrize(
    ("tests", "program", "outcome"),
    [
        (ADD, "", WRONG),
        (ADD, "import no_such_module", WRONG),
        (ADD, "def add(a, b):\n    return [0] * 10**10", WRONG),
        (ADD, "def add(a, b):\n    import os, signal\n    os.kill(os.getpid(), signal.SIGKILL)", WRONG),
        (ADD, "def add(a, b):\n    import sys\n    sys.setrecursionlimit(10**9)\n    return add(a, b)", WRONG),
        (ADD, "x" * 300_000, WRONG),
        (ECHO, "import os\nos.unlink(__file__)\nprint(input())", WRONG),
        (ECHO, "print(input()", WRONG),
        (NO_SUCH_MODULE, "def add(a, b):\n    return a + b", UNGRADABLE),
        ({**ADD, "code": "assert add(1, 2) =="}, "def add(a, b):\n    return a + b", UNGRADABLE),
        ({**ADD, "code": "assert True", "entry_point": None}, "def add(a, b):\n    return a + b", UNGRADABLE),
    ],
)
def test_programs(code: CodeGrader, tests: dict[str, Any], program: str, outcome: Outcome) -> None:
    verdict = code.grade([record("", "code", tests=tests)], [f"```python\n{program}\n```"])[0]
    assert verdict.outcome is outcome, verdict.reason


def test_a_program_that_takes_away_its_own_directory_is_wrong() -> None:
    """The next case cannot start then, which without a sandbox a program can bring about."""
    sandbox = Sandbox(allow_unsandboxed=True)
    sandbox._prefix = None
    program = "import os, shutil\nshutil.rmtree(os.path.dirname(__file__))\nprint(input())"
    report = sandbox.run({**ECHO, "source": program, "seconds": 10.0}, total_seconds=10.0)
    assert report.outcome == "wrong", report.reason


@pytest.mark.parametrize("answer", ["", "\n\n", r"\boxed{Par", "x" * 100_000, "\ud800", "no " * 10_000])
def test_facts_and_spellings_are_right_or_wrong(answer: str) -> None:
    assert FactualGrader().grade([record("Paris", "factual", aliases=["Paris"])], [answer])[0].outcome is WRONG
    assert ExactGrader().grade([record("Paris")], [answer])[0].outcome is WRONG
