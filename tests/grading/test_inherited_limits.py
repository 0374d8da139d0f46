"""Grading under limits that a shell or a batch system has set: they are kept, and cost no verdict."""

import ctypes
import resource
import subprocess
import sys
from pathlib import Path

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
for name, found in zip(LIMITS, workers.map(hard_limit, LIMITS)):
    assert found.value == min(LIMITS[name], found.value), found
workers.close()
"""
GRADE_PROGRAMS = """
from coca_mindspeed.data.records import Record
from coca_mindspeed.grading.code import CodeGrader

grader = CodeGrader(workers=2)
source = "import resource\\ndef f(name): return resource.getrlimit(getattr(resource, name))[1]"
tests = [{"kind": "asserts", "code": f"assert f({name!r}) <= {LIMITS[name]}", "entry_point": "f"} for name in LIMITS]
records = [Record("r", "d", "code", "?", "", metadata={"tests": each}) for each in tests]
verdicts = grader.grade(records, [source] * len(LIMITS))
assert [verdict.outcome.value for verdict in verdicts] == ["right"] * len(LIMITS), verdicts
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


def run(code, limits):
    """Run the code under the limits, by a user that may not raise them; a normal one, or root without that right."""

    def lower():
        for name, limit in limits.items():
            resource.setrlimit(getattr(resource, name), (limit, limit))
        ctypes.CDLL(None).prctl(_PR_CAPBSET_DROP, _CAP_SYS_RESOURCE, 0, 0, 0)

    code = f"LIMITS = {limits}\n{code}"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, preexec_fn=lower, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2_000:]


def test_mathematics_is_graded_under_inherited_limits():
    run(GRADE, {name: LIMITS[name] for name in ("RLIMIT_CPU", "RLIMIT_AS")})


@needs_sandbox
def test_programs_are_graded_under_inherited_limits():
    run(GRADE_PROGRAMS, LIMITS)


@needs_sandbox
def test_an_inherited_limit_below_a_programs_makes_it_ungradable_not_wrong():
    code = """
from coca_sandbox.sandbox import Sandbox
sandbox = Sandbox()
job = {"kind": "stdio", "source": "print(1)", "cases": [{"input": "", "output": "1"}], "seconds": 60.0}
assert sandbox.run(job, 60.0).outcome == "ungradable"
assert sandbox.run(job, 15.0).outcome == "right"
"""
    run(code, {"RLIMIT_CPU": 20})


def test_a_worker_that_has_used_up_an_inherited_limit_is_replaced():
    """It is given more to do, in tasks, than one process may compute."""
    code = """
from coca_mindspeed.grading.workers import Workers
from tests.grading.processes import compute
workers = Workers(count=1, seconds=2.0)
assert [result.value for result in workers.map(compute, [0.7] * 4)] == [0.7] * 4
workers.close()
"""
    run(code, {"RLIMIT_CPU": 3})
