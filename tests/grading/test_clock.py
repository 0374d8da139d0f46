"""The clock of programs and its deadlines; what is charged for is measured in ``test_busy_machine.py``."""

import os
import subprocess
import sys
import time

import pytest

from coca_mindspeed.grading.code.inside.process import STARVED, WALL_FACTOR, Clock, JobError, descendants

pytestmark = pytest.mark.timing


def test_time_in_which_the_observer_stood_still_is_free() -> None:
    """A container that is paused, say: everything in it stands still."""
    process = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(1000)"])
    try:
        clock = Clock(lambda: descendants(process.pid))
        time.sleep(1.0)
        clock.excuse(0.9)
        assert clock.now() < 0.5
        time.sleep(0.5)
        assert clock.now() > 0.5
    finally:
        process.kill()
        process.wait()


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
