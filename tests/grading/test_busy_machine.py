"""What a machine with too much to do may cost is time: no right answer's reward, and no wrong one gets any."""

import importlib
import os
import resource
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from coca_mindspeed.grading.code import CodeGrader
from coca_mindspeed.grading.verdict import Outcome
from coca_sandbox import sandbox as sandboxes
from coca_sandbox.inside import process as processes
from coca_sandbox.inside.process import STARVED, WALL_FACTOR, JobError, descendants
from coca_sandbox.sandbox import Sandbox
from tests.grading.dying_trainer import command_of, processor_seconds
from tests.grading.processes import one_processor
from tests.grading.sandbox_package import needs_sandbox
from tests.grading.test_code import asserts, grade, record
from tests.support.waiting import Clock, until

pytestmark = [pytest.mark.nightly, pytest.mark.timing]

sys.path.insert(0, str(Path(processes.__file__).parent))  # as inside
jobs = importlib.import_module("jobs")


@pytest.fixture(scope="module")
def sandbox():
    return Sandbox()


JOBS = {
    "asserts": {"kind": "asserts", "tests": "assert f() == 42", "prompt": None, "entry_point": None},
    "call": {"kind": "call", "entry_point": "f", "cases": [{"arguments": [], "expected": 42}]},
    "stdio": {"kind": "stdio", "cases": [{"input": "", "output": "42"}]},
}


def report_of(sandbox, kind, source, seconds):
    ending = "print(42)" if kind == "stdio" else "def f(): return 42"
    return sandbox.run({**JOBS[kind], "source": f"{source}\n{ending}", "seconds": seconds}, total_seconds=seconds)


@needs_sandbox
def test_a_sandbox_that_starts_late_leaves_a_program_its_time(sandbox, monkeypatch):
    monkeypatch.setattr(sandboxes, "GRACE_SECONDS", 1.0)
    monkeypatch.setattr(sandboxes, "WALL_FACTOR", 1.0)
    assert sandbox.command_prefix is not None
    late = ["sh", "-c", 'sleep 3.5; exec "$@"', "sh", *sandbox.command_prefix]
    monkeypatch.setattr(sandbox, "command_prefix", late)
    assert report_of(sandbox, "stdio", "import time; time.sleep(0.8)", 3.0).outcome == "right"


NO_PROCESS = 'echo "bwrap: Creating new namespace failed: Resource temporarily unavailable" >&2; exit 1'


@needs_sandbox
@pytest.mark.parametrize(
    ("failures", "failure", "reason"),
    [(2, NO_PROCESS, ""), (9, NO_PROCESS, "temporarily unavailable"), (9, "sleep 60", "did not start within 0.3 s")],
)
def test_a_sandbox_that_does_not_start_is_tried_again(sandbox, monkeypatch, tmp_path, failures, failure, reason):
    if failure != NO_PROCESS:
        monkeypatch.setattr(sandboxes, "START_SECONDS", 0.3)
    monkeypatch.setattr(sandboxes, "PAUSE_SECONDS", 0.01)
    assert sandbox.command_prefix is not None
    counter = tmp_path / "attempts"
    script = f'echo x >> {counter}; if [ "$(wc -l < {counter})" -le {failures} ]; then {failure}; fi; exec "$@"'
    shell = ["/bin/sh", "-c", f"PATH={os.environ['PATH']}; {script}", "sh"]
    monkeypatch.setattr(sandbox, "command_prefix", [*shell, *sandbox.command_prefix])
    report = report_of(sandbox, "stdio", "", 5.0)
    assert (report.outcome, report.timed_out) == ("ungradable" if reason else "right", False)
    assert reason in report.reason
    assert len(counter.read_text().split()) == min(failures + 1, 4)


@pytest.fixture
def many_files():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
    taken = [os.open(os.devnull, os.O_RDONLY) for _ in range(1_100)]
    yield
    for descriptor in taken:
        os.close(descriptor)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@needs_sandbox
@pytest.mark.usefixtures("many_files")
def test_a_caller_with_many_open_files_grades_as_well(sandbox):
    assert report_of(sandbox, "stdio", "", 5.0).outcome == "right"


@needs_sandbox
@pytest.mark.parametrize("kind", ["asserts", "call"])
def test_all_calls_of_a_program_share_its_time(kind):
    """Whatever the machine took to start it."""
    with closing(CodeGrader(seconds=2.0, total_seconds=2.0, workers=1)) as grader:
        calls = range(3)
        if kind == "asserts":
            tested = asserts("\n".join(f"assert f({n}) == {n}" for n in calls))
        else:
            cases = [{"arguments": [n], "expected": n} for n in calls]
            tested = record({"kind": "call", "entry_point": "f", "cases": cases})
        verdict = grade(grader, tested, "import time\ndef f(n):\n    time.sleep(0.9)\n    return n")
        assert verdict.outcome is Outcome.WRONG, verdict
        assert "took longer than 2 s" in verdict.reason
        assert grader.metrics()["timeouts"] == 1
        assert grade(grader, tested, "def f(n): return n").outcome is Outcome.RIGHT


def test_what_ended_in_time_counts_where_its_reader_was_late(monkeypatch, tmp_path):
    script = tmp_path / "program.py"
    script.write_text("print(42)")
    until_ready, start = processes.until_ready, jobs.processes.start
    started = []

    def remember(*arguments, **options):
        started.append(start(*arguments, **options))
        return started[-1]

    def late(reading, writing, deadline):
        if started[-1].returncode is None:  # not read to its end yet
            os.waitid(os.P_PID, started[-1].pid, os.WEXITED | os.WNOWAIT)
        until(lambda: deadline.left() <= 0)
        return until_ready(reading, writing, deadline)

    monkeypatch.setattr(jobs.processes, "start", remember)
    monkeypatch.setattr(jobs.processes, "until_ready", late)
    assert jobs.run_script(str(script), b"", 100, seconds=0.5).output == b"42\n"


FLOOD = """
import fcntl, os, time
until = time.monotonic() + 60
fcntl.fcntl(2, 1031, 1 << 20)  # F_SETPIPE_SZ: always something to read
for child in range(3):  # they go on when the program has ended, and answer in the end
    if os.fork() == 0:
        while time.monotonic() < until:
            os.write(2, b"x" * 60_000)
        if child == 0:
            os.write(1, b"42")
        os._exit(0)
os._exit(0)
"""


def test_children_that_write_on_win_no_time(monkeypatch, tmp_path):
    until_ready = processes.until_ready

    def slow(*arguments):
        time.sleep(0.01)  # a slow reader: there is always something left to read
        return until_ready(*arguments)

    monkeypatch.setattr(jobs.processes, "until_ready", slow)
    script = tmp_path / "program.py"
    script.write_text(FLOOD)
    started = time.monotonic()
    with pytest.raises(jobs.JobError) as failure:
        jobs.run_script(str(script), b"", 100, seconds=1.0)
    assert failure.value.timed_out
    assert time.monotonic() - started < 30.0  # a busy machine; they go on for twice as long


@needs_sandbox
def test_a_verdict_that_is_read_late_counts(sandbox, monkeypatch):
    """The caller stood still, say, from when the program had started until long behind its limit."""
    clock, poll, calls = Clock(monkeypatch, sandboxes), sandboxes.processes.poll, 0

    def late(*arguments):
        nonlocal calls
        found = poll(*arguments)
        if found[0]:
            calls += 1
            if calls > 1:  # the first time, the sandbox is ready
                clock.ahead += 1e4
        return found

    monkeypatch.setattr(sandboxes.processes, "poll", late)
    assert report_of(sandbox, "stdio", "", 2.0).outcome == "right"
    assert calls > 1


COMPUTE = "import time\nwhile time.process_time() < {}: pass\n"


@needs_sandbox
def test_a_busy_machine_costs_a_program_time_and_not_its_verdict(sandbox):
    with one_processor(competitors=4):
        started = time.monotonic()
        for kind in JOBS:
            report = report_of(sandbox, kind, COMPUTE.format(0.4), seconds=0.6)
            assert report.outcome == "right", (kind, report)
        assert time.monotonic() - started > 3 * 1.0  # it was busy


HIDING = {
    "sleeps": "time.sleep(1000)",
    "sleeps shortly": "while True: time.sleep(1e-6)",
    "gives way": "while True: os.sched_yield()",
    "waits for nothing": "import threading; threading.Event().wait()",
    "polls": "import threading\ndone = threading.Event()\nwhile not done.wait(0.001): pass",
    "works through children that live for a moment": "while True:\n    child = os.fork()\n    if child == 0: "
    "sum(range(10000)); os._exit(0)\n    os.waitpid(child, 0)",
    "waits for its children": "for _ in range(20):\n    if os.fork() == 0:\n        while True: pass\nos.wait()",
    "stops": "import signal; os.kill(os.getpid(), signal.SIGSTOP)",
}


@needs_sandbox
@pytest.mark.parametrize("name", HIDING)
def test_nothing_that_a_program_does_passes_for_a_busy_machine(sandbox, name):
    with one_processor(competitors=2):
        report = report_of(sandbox, "asserts", f"import os, time\n{HIDING[name]}", seconds=0.5)
    assert report.outcome == "wrong", report


@needs_sandbox
def test_a_program_without_a_processor_is_tried_again(sandbox, monkeypatch):
    assert report_of(sandbox, "asserts", "", 5.0).outcome == "right"  # reading files would be charged for
    attempt, attempts = Sandbox.run_once, 0

    def count(*arguments):
        nonlocal attempts
        attempts += 1
        return attempt(*arguments)

    monkeypatch.setattr(Sandbox, "run_once", count)
    with one_processor(competitors=24):
        report = report_of(sandbox, "asserts", "while True: pass", seconds=0.4)
    assert (report.outcome, attempts) == ("ungradable", 2), report


@needs_sandbox
def test_a_sandbox_that_is_stopped_from_outside_costs_no_verdict(sandbox):
    with ThreadPoolExecutor(1) as thread:
        pending = thread.submit(report_of, sandbox, "asserts", COMPUTE.format(1.0), 2.0)
        until(lambda: pending.done() or any(processor_seconds(each) > 0.4 for each in inside()))
        stopped = inside()
        for each in stopped:
            os.kill(each, signal.SIGSTOP)
        time.sleep(3.0)  # longer than the program's limit
        for each in stopped:
            os.kill(each, signal.SIGCONT)
        assert pending.result().outcome == "right", pending.result()
    assert len(stopped) >= 2  # harness and program


def inside():
    """The processes of sandboxes."""
    return [each for each in descendants(os.getpid()) if "/inside/" in command_of(each)]


def test_a_deadline_is_in_charged_time_and_at_last_in_wall_time(monkeypatch):
    time = Clock(monkeypatch, processes)
    clock = processes.Clock(list)  # of no process: no thread is runnable, so wall time is charged
    deadline = clock.deadline(200.0)
    assert 0 < deadline.left() <= 200.0
    assert clock.deadline(5000.0).sooner(100.0).left() <= 100.0
    assert deadline.sooner(5000.0).left() <= 200.0
    assert not deadline.expired(200.0)
    time.ahead += 200.0
    assert deadline.left() <= 0
    assert deadline.expired(200.0)
    late = clock.deadline(50.0)
    clock.excuse(1e6)
    time.ahead += 50.0 * WALL_FACTOR
    with pytest.raises(JobError) as busy:
        late.expired(50.0)
    assert busy.value.outcome == STARVED
