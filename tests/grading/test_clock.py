"""The clock of programs: waiting for a processor is free, everything else counts."""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from coca_mindspeed.grading.code.inside.process import STARVED, WALL_FACTOR, Clock, JobError, descendants

pytestmark = pytest.mark.timing

PROCESSOR = min(os.sched_getaffinity(0))
COMPETITORS = 5
WALL_SECONDS = 1.0

SPIN = "while True: pass"
# Each with whether it is charged for (nearly) all of the wall time on a machine that is busy with other work.
PROGRAMS = {
    "computes": (SPIN, False),
    "sleeps": ("import time; time.sleep(1000)", True),
    "sleeps shortly, again and again": ("import time\nwhile True: time.sleep(1e-6)", True),
    "polls": ("import threading\ndone = threading.Event()\nwhile not done.wait(0.001): pass", True),
    "waits for input": ("input()", True),
    "waits for itself": ("import threading\nlock = threading.Lock()\nlock.acquire()\nlock.acquire()", True),
    "stops itself": ("import os, signal; os.kill(os.getpid(), signal.SIGSTOP)", True),
}


def start(source: str) -> "subprocess.Popen[bytes]":
    # A session of its own: by default the kernel divides the processors among sessions first.
    process = subprocess.Popen([sys.executable, "-S", "-c", source], stdin=subprocess.PIPE, start_new_session=True)
    os.sched_setaffinity(process.pid, {PROCESSOR})
    return process


def stop(processes: "list[subprocess.Popen[bytes]]") -> None:
    for process in processes:
        for each in descendants(process.pid)[::-1]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(each, 9)
        process.communicate()


@pytest.fixture
def busy() -> Iterator[None]:
    """A processor on which others compete with the program."""
    others = [start(SPIN) for _ in range(COMPETITORS)]
    yield
    stop(others)


def processor_seconds() -> float:
    """Processor time that all processes have used."""
    (line,) = [line for line in Path("/proc/stat").read_text().splitlines() if line.startswith(f"cpu{PROCESSOR} ")]
    user, nice, system, _, _, *others = map(int, line.split()[1:9])
    return (user + nice + system + sum(others)) / os.sysconf("SC_CLK_TCK")


def tree_seconds(root: int) -> float:
    """Processor time of the processes and of the children that they have waited for."""
    ticks = 0
    for process in descendants(root):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a child that lives for a moment
            fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
            ticks += sum(int(value) for value in fields[11:15])
    return ticks / os.sysconf("SC_CLK_TCK")


def measure(source: str) -> tuple[float, float]:
    """Of the wall time, the share that the program is charged for, and the one that other processes computed for."""
    process = start(source)
    try:
        time.sleep(0.3)
        clock = Clock(lambda: descendants(process.pid))
        own, everybody = tree_seconds(process.pid), processor_seconds()
        started = time.monotonic()
        while (wall := time.monotonic() - started) < WALL_SECONDS:
            time.sleep(0.05)
            clock.now()
        others = processor_seconds() - everybody - (tree_seconds(process.pid) - own)
        return clock.now(look=True) / wall, others / wall
    finally:
        stop([process])


@pytest.mark.usefixtures("busy")
@pytest.mark.parametrize("name", PROGRAMS)
def test_on_a_busy_machine_only_waiting_for_a_processor_is_free(name: str) -> None:
    source, all_of_it = PROGRAMS[name]
    share, _ = measure(source)
    assert share > 0.8 if all_of_it else share < 0.6, share


FORK = "import os\nfor _ in range({}):\n    if os.fork() == 0: break\n"


@pytest.mark.parametrize(
    "source",
    [
        SPIN,
        FORK.format(6) + SPIN,
        # Children that compete with each other for one processor, and the one that waits for them.
        "import os\nchild = os.fork()\nif child: os.waitpid(child, 0)\n" + FORK.format(6) + SPIN,
        # Work is done by children that live for a moment.
        "import os\nwhile True:\n    child = os.fork()\n    if child == 0: sum(range(10000)); os._exit(0)\n"
        "    os.waitpid(child, 0)",
        # All start at once, and wait for each other most of the time.
        FORK.format(12) + "import time\nwhile True:\n    time.sleep(0.2 - time.time() % 0.2)\n    sum(range(100000))",
    ],
)
def test_waiting_for_its_own_processes_is_not_free(source: str) -> None:
    share, others = measure(source)
    assert share > 0.9 - others, (share, others)


def test_processors_in_parallel_are_added_up() -> None:
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("one processor")
    before = os.times()
    clock = Clock(lambda: descendants(os.getpid()))
    children = [subprocess.Popen([sys.executable, "-S", "-c", "sum(range(20_000_000))"]) for _ in range(2)]
    for child in children:
        while child.poll() is None:
            clock.now()
            time.sleep(0.05)
    after = os.times()
    used = sum(after[:4]) - sum(before[:4])
    assert clock.now(look=True) >= 0.9 * used


def test_time_in_which_the_observer_stood_still_is_free() -> None:
    """A container that is paused, say: everything in it stands still."""
    process = start("import time; time.sleep(1000)")
    try:
        clock = Clock(lambda: descendants(process.pid))
        time.sleep(1.0)
        clock.excuse(0.9)
        assert clock.now() < 0.5
        time.sleep(0.5)
        assert clock.now() > 0.5
    finally:
        stop([process])


def test_a_deadline_is_in_charged_time_and_at_last_in_wall_time() -> None:
    clock = Clock(lambda: [os.getpid()])
    deadline = clock.deadline(0.2)
    assert 0 < deadline.left() <= 0.2
    assert clock.deadline(5.0).sooner(0.1).left() <= 0.1
    assert deadline.sooner(5.0).left() <= 0.2
    time.sleep(0.25)
    assert deadline.left() <= 0
    assert deadline.expired(0.2)
    late = clock.deadline(0.05)
    clock.excuse(60.0)
    time.sleep(0.05 * WALL_FACTOR)
    with pytest.raises(JobError) as busy:
        late.expired(0.05)
    assert busy.value.outcome == STARVED
