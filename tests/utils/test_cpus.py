"""How many CPUs there are for this process: what a container's quota takes away is not there."""

import joblib
import pytest

from coca_mindspeed.grading.math.grader import MathGrader
from coca_mindspeed.mindspeed.machine import Machine
from coca_mindspeed.utils.cpus import usable_cpus


def test_graders_start_no_more_processes_than_the_quota_keeps_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joblib, "cpu_count", lambda: 3)
    assert usable_cpus() == 3
    assert Machine().cpus() == 3
    grader = MathGrader()
    assert grader._workers._count == 3
    grader.close()
