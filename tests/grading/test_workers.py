"""The pool of processes: order, limits (also inherited ones), replacement, memory, and what workers import."""

import ctypes
import os
import resource
import signal
import subprocess
import sys
import time
from contextlib import closing, suppress
from functools import partial
from pathlib import Path

import pytest

from coca_mindspeed.errors import GradingError
from coca_mindspeed.grading import workers as workers_module
from coca_mindspeed.grading.workers import Failure, Workers
from tests.grading.dying_trainer import command_of, descendants, end_survivors
from tests.grading.processes import (
    compute,
    die,
    die_while_sending,
    dispatch,
    double,
    eat_memory,
    fail,
    hang_in_one_bytecode,
    ignore_termination_and_sleep,
    nap,
    one_processor,
    process_id,
    processor_time_left,
    search_path,
)
from tests.grading.sandbox_package import REPOSITORY, needs_sandbox
from tests.support.waiting import Clock, until


@pytest.fixture(scope="module")
def workers():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(workers_module, "WALL_FACTOR", 200.0)  # a busy machine is the subject of one test
        workers = Workers(count=2, seconds=1.0, memory_bytes=2 << 30)
    yield workers
    workers.close()


def test_results_come_in_order(workers):
    naps = [0.2, 0.0, 0.1, 0.0]
    assert [r.value for r in workers.map(nap, naps)] == naps
    assert [r.value for r in workers.map(double, range(1000))] == [2 * n for n in range(1000)]


def test_workers_start_with_a_search_path_that_holds_more_than_text(monkeypatch):
    """Python itself ignores other entries; of text every character counts."""
    monkeypatch.setattr(sys, "path", [Path("/nowhere"), None, "/n\u00f6where's", *sys.path])
    with closing(Workers(count=1, seconds=5.0)) as workers:
        [path] = [result.value for result in workers.map(search_path, [None])]
    assert path[0] == "/n\u00f6where's"
    assert path == [entry for entry in sys.path if isinstance(entry, str)]


@pytest.mark.timing
def test_a_hang_is_killed_and_delays_only_itself(workers):
    timeouts, restarts = workers.timeouts, workers.restarts
    results = list(workers.map(dispatch, [(process_id, 0), (hang_in_one_bytecode, 0), *[(process_id, 0)] * 200]))
    assert results[1].failure is Failure.TIMEOUT
    assert results[1].value is None
    assert "1 s" in results[1].detail
    # The other worker went on: it has done all others, and left none to the successor of the one that hung.
    assert len({result.value for result in (results[0], *results[2:])}) == 1
    assert (workers.timeouts, workers.restarts) == (timeouts + 1, restarts + 1)


def test_a_worker_that_ignores_termination_is_killed_all_the_same(monkeypatch, tmp_path):
    ignores, clock, wait = tmp_path / "ignores", Clock(monkeypatch, workers_module), workers_module.wait

    def late(connections, seconds):
        until(lambda: ignores.exists() or wait(connections, 0.0))
        if not (readable := wait(connections, 0.0)):  # it sleeps
            ignores.unlink()
            clock.ahead += 1e4
        return readable

    monkeypatch.setattr(workers_module, "wait", late)
    with closing(Workers(count=1, seconds=5.0)) as workers:
        results = list(workers.map(ignore_termination_and_sleep, [ignores]))
        # It has used no processor time; so it was tried twice.
        assert (results[0].failure, workers.restarts, workers.timeouts) == (Failure.STARVED, 2, 0)
        assert next(iter(workers.map(double, [4]))).value == 8


def test_other_failures_are_told_apart(workers):
    died, raised, memory = (next(iter(workers.map(f, [0]))) for f in (die, fail, eat_memory))
    assert (died.failure, died.detail) == (Failure.DIED, "killed its worker process")
    assert (raised.failure, raised.detail) == (Failure.RAISED, "KeyError: 'nothing there'")
    assert (memory.failure, memory.detail) == (Failure.DIED, "ran out of memory")
    assert next(iter(workers.map(double, [21]))).value == 42


def test_a_worker_that_dies_while_it_sends_loses_only_its_own_result(workers):
    results = list(workers.map(dispatch, [(die_while_sending, 0), (nap, 0.2), (nap, 0.0), (nap, 0.1)]))
    assert [result.value for result in results] == [None, 0.2, 0.0, 0.1]
    assert results[0].failure is Failure.DIED


def test_a_result_that_is_read_late_counts(monkeypatch):
    """The caller took hours for the result before, while this one came."""
    clock, wait = Clock(monkeypatch, workers_module), workers_module.wait
    monkeypatch.setattr(workers_module, "wait", lambda connections, _: wait(connections))
    with closing(Workers(count=1, seconds=5.0)) as workers:
        for result in workers.map(double, [1, 2]):
            assert result.failure is None
            clock.ahead += 1e4
    assert workers.restarts == 0


def test_workers_that_do_not_start_are_an_error_and_not_a_verdict():
    workers = Workers(count=1, seconds=5.0, warm_up=partial(die, 0))
    with closing(workers), pytest.raises(GradingError, match=r"exit code -9\b"):
        list(workers.map(double, [1]))


@pytest.mark.parametrize(("allowed", "refusals"), [(0, 2), (0, 9), (1, 99)])
def test_a_process_that_is_refused_is_asked_for_again(monkeypatch, allowed, refusals):
    popen, asked = subprocess.Popen, []

    def refuse(*arguments, **options):
        asked.append(1)
        if allowed < len(asked) <= allowed + refusals:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        return popen(*arguments, **options)

    monkeypatch.setattr(subprocess, "Popen", refuse)
    monkeypatch.setattr(workers_module, "PAUSE_SECONDS", 0.01)
    with closing(Workers(count=3, seconds=5.0)) as workers:
        if refusals == 9:
            with pytest.raises(GradingError, match="temporarily unavailable"):
                list(workers.map(double, [1]))
        else:  # fewer workers will do
            assert [result.value for result in workers.map(double, range(10))] == [2 * n for n in range(10)]


@pytest.mark.timing
def test_a_kernel_timer_limits_a_tasks_processor_time(monkeypatch):
    monkeypatch.setattr(workers_module, "WALL_FACTOR", 200.0)
    with closing(Workers(count=1, seconds=0.5)) as workers:
        (left,) = workers.map(processor_time_left, [0])
        assert left.value is not None
        assert 0 < left.value <= 0.6
        # Each task has its own.
        assert [result.value for result in workers.map(compute, [0.35, 0.35])] == [0.35, 0.35]


@pytest.mark.timing
def test_a_busy_machine_costs_a_task_time_and_not_its_result(monkeypatch):
    """Other programs take the processor: 0.3 s may take a minute here, beyond the usual limit in wall time."""
    monkeypatch.setattr(workers_module, "WALL_FACTOR", 200.0)
    with one_processor(competitors=2), closing(Workers(count=1, seconds=0.5)) as workers:
        list(workers.map(double, [1]))  # it has started
        started = time.perf_counter()
        assert [result.value for result in workers.map(compute, [0.3])] == [0.3]
        assert time.perf_counter() - started > 0.5


ENDLESS = {
    "tasks": """
from coca_mindspeed.grading.workers import Workers
from tests.grading.processes import announce_and_sleep
list(Workers(count=2, seconds=100.0).map(announce_and_sleep, [1000.0] * 20))
""",
    "programs": """
from coca_mindspeed.data.records import Record
from coca_mindspeed.grading.code import CodeGrader
tests = dict(kind="asserts", code="assert f() == 1", entry_point="f")
records = [Record("r", "d", "code", "?", "", metadata=dict(tests=tests))] * 20
grader = CodeGrader(seconds=100.0, total_seconds=100.0, workers=2)
grader.grade(records, ["import time\\ndef f(): time.sleep(1000)"] * 20)
""",
}


@pytest.mark.parametrize("work", ["tasks", pytest.param("programs", marks=needs_sandbox)])
def test_an_interrupt_ends_grading_and_the_process(work):
    command = [sys.executable, "-c", ENDLESS[work]]
    process = subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    below = {}
    try:
        if work == "tasks":
            assert [process.stdout.readline() for _ in range(2)] == ["running\n"] * 2
        else:
            until(lambda: sum("/inside/program.py" in command_of(each) for each in descendants(process.pid)) == 2)
        below = descendants(process.pid)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)  # a task would sleep for longer
    finally:
        process.kill()
        left = end_survivors(below, 60.0)
    assert "KeyboardInterrupt" in errors
    assert below
    assert left == []


def test_workers_are_recycled():
    with closing(Workers(count=1, seconds=5.0, tasks_per_worker=5)) as workers:
        assert len({r.value for r in workers.map(process_id, range(12))}) == 3


def test_closing_leaves_no_process_and_the_pool_refuses_more():
    workers = Workers(count=2, seconds=5.0)
    worker = next(iter(workers.map(process_id, [0]))).value
    workers.close()
    workers.close()
    assert not Path(f"/proc/{worker}").exists()
    with pytest.raises(GradingError, match="closed"):
        list(workers.map(double, [1]))


LEFT_OPEN = """
import gc, os, subprocess
from tests.grading.dying_trainer import descendants, survivors
from tests.grading.processes import double
from coca_mindspeed.grading.workers import Workers

def run_tasks():
    return list(Workers(count=4, seconds=5.0).map(double, range(8)))

run_tasks()
workers = descendants("self")
assert len(workers) == 4
gc.collect()
assert survivors(workers, 60.0) == []
subprocess.run(["true"])  # its predecessors are forgotten, and their descriptors are free
pipes = [os.pipe() for _ in range(12)]
child = os.fork()
if child == 0:
    for _, writer in pipes:
        os.write(writer, b"x")
    os._exit(0)
os.waitpid(child, 0)
for reader, writer in pipes:
    os.close(writer)
    assert os.read(reader, 1) == b"x", "a forked process lost a descriptor"
run_tasks()
"""


def test_workers_that_nobody_closes_leave_descriptors_alone():
    command = [sys.executable, "-c", LEFT_OPEN]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


TRAINER = r"""
import heavy
from coca_mindspeed.data.records import Record
from coca_mindspeed.grading.math import grader as module
from tests.grading.processes import imported
pools = []
class Pool(module.Workers):
    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        pools.append(self)
module.Workers = Pool
grader = module.MathGrader(workers=1, seconds=10)
assert grader.grade([Record('1', 'd', 'math', '?', 'x+1')], [r'\boxed{1+x}'])[0].correct
print(*[r.value for r in pools[0].map(imported, ['heavy', 'torch', 'sympy', 'mpmath'])])
grader.close()
"""


def test_workers_do_not_import_the_callers_main(tmp_path):
    """It has no `if __name__ == "__main__"`: with the standard spawn it would start processes without end."""
    (tmp_path / "heavy.py").touch()
    (tmp_path / "train.py").write_text(TRAINER, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, str(tmp_path / "train.py")]
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["False", "False", "True", "True"]


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


def threads_of_this_user():
    threads = 0
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            threads += len(list((process / "task").iterdir())) if process.stat().st_uid == os.getuid() else 0
    return threads


def run(code, limits):
    """Run the code under the limits, by a user that may not raise them; a normal one, or root without that right."""

    def lower():
        for name, limit in limits.items():
            resource.setrlimit(getattr(resource, name), (limit, limit))
        ctypes.CDLL(None).prctl(_PR_CAPBSET_DROP, _CAP_SYS_RESOURCE, 0, 0, 0)

    if "RLIMIT_NPROC" in limits:  # it counts all threads of a user, those of the other tests too
        limits = {**limits, "RLIMIT_NPROC": limits["RLIMIT_NPROC"] + threads_of_this_user()}
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


@pytest.mark.timing
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
