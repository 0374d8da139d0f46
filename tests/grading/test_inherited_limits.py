"""Grading under limits that a shell or a batch system has set: they are kept, and cost no verdict."""

import ctypes
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from tests.grading.sandbox_package import needs_sandbox

REPOSITORY = Path(__file__).parents[2]
_PR_CAPBSET_DROP, _CAP_SYS_RESOURCE = 24, 24

GRADE = """
import resource
from coca_mindspeed.data.records import Record
from coca_mindspeed.grading.math.grader import MathGrader
from coca_mindspeed.grading.workers import Workers
from tests.grading.processes import hard_limit

grader = MathGrader(workers=1, seconds=10)
assert grader.grade([Record("1", "d", "math", "?", "x+1")], ["\\\\boxed{1+x}"])[0].correct
grader.close()
workers = Workers(count=1, seconds=5.0)
(found,) = workers.map(hard_limit, [NAME])
assert found.value == min(LIMIT, found.value), found
workers.close()
"""
GRADE_PROGRAMS = """
from coca_mindspeed.data.records import Record
from coca_mindspeed.grading.code.grader import CodeGrader

grader = CodeGrader(workers=2)
source = "import resource\\ndef f(): return resource.getrlimit(resource." + NAME + ")[1]"
tests = {"kind": "asserts", "code": f"assert f() <= {LIMIT}", "entry_point": "f"}
records = [Record(str(n), "d", "code", "?", "", metadata={"tests": tests}) for n in range(4)]
verdicts = grader.grade(records, [source] * 4)
assert [verdict.outcome.value for verdict in verdicts] == ["right"] * 4, verdicts
grader.close()
"""
LIMITS = {
    "RLIMIT_CPU": 3_600,
    "RLIMIT_AS": 900 << 20,
    "RLIMIT_NOFILE": 64,
    "RLIMIT_NPROC": 24,
    "RLIMIT_FSIZE": 8 << 20,
    "RLIMIT_SIGPENDING": 64,
}


def run(code: str, name: str, limit: int) -> None:
    """Run the code under the limit, by a user that may not raise it; a normal one, or root without that right."""

    def lower() -> None:
        kind = getattr(resource, name)
        resource.setrlimit(kind, (limit, limit))
        ctypes.CDLL(None).prctl(_PR_CAPBSET_DROP, _CAP_SYS_RESOURCE, 0, 0, 0)

    code = f"NAME, LIMIT = {name!r}, {limit}\n{code}"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, preexec_fn=lower, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2_000:]


@pytest.mark.parametrize("name", ["RLIMIT_CPU", "RLIMIT_AS"])
def test_mathematics_is_graded_under_inherited_limits(name: str) -> None:
    run(GRADE, name, LIMITS[name])


@needs_sandbox
@pytest.mark.parametrize("name", LIMITS)
def test_programs_are_graded_under_inherited_limits(name: str) -> None:
    run(GRADE_PROGRAMS, name, LIMITS[name])


@needs_sandbox
def test_an_inherited_limit_below_a_programs_makes_it_ungradable_not_wrong() -> None:
    code = """
from coca_mindspeed.grading.code.sandbox import Sandbox
sandbox = Sandbox()
job = {"kind": "stdio", "source": "print(1)", "cases": [{"input": "", "output": "1"}], "seconds": 60.0}
assert sandbox.run(job, 60.0).outcome == "ungradable"
assert sandbox.run(job, 15.0).outcome == "right"
"""
    run(code, "RLIMIT_CPU", 20)


def test_a_worker_that_has_used_up_an_inherited_limit_is_replaced() -> None:
    """It is given more to do, in tasks, than one process may compute."""
    code = """
from coca_mindspeed.grading.workers import Workers
from tests.grading.processes import compute
workers = Workers(count=1, seconds=2.0)
assert [result.value for result in workers.map(compute, [0.7] * 4)] == [0.7] * 4
workers.close()
"""
    run(code, "RLIMIT_CPU", 3)
