"""Memory limits of control groups, and CPUs by the quota of a container."""

import joblib
import pytest

from coca_mindspeed.grading.math.grader import MathGrader
from coca_mindspeed.mindspeed.doctor import Machine
from coca_mindspeed.utils.process import memory_limit, usable_cpus

V1 = "sys/fs/cgroup/memory"


@pytest.mark.parametrize(
    ("group", "files", "limit"),
    [
        ("0::/", {"sys/fs/cgroup/memory.max": "1000"}, 1000),
        ("0::/", {"sys/fs/cgroup/memory.max": "max"}, None),
        ("0::/a/b", {"sys/fs/cgroup/a/memory.max": "500", "sys/fs/cgroup/a/b/memory.max": "max"}, 500),
        ("0::/a/b", {"sys/fs/cgroup/a/memory.max": "500", "sys/fs/cgroup/a/b/memory.max": "400"}, 400),
        # a container sees its own group at the root, below the name that the host gave
        ("0::/docker/12", {"sys/fs/cgroup/memory.max": "300"}, 300),
        ("9:memory:/docker/12\n0::/", {f"{V1}/memory.limit_in_bytes": "200"}, 200),
        (
            "9:memory:/a",
            {f"{V1}/a/memory.limit_in_bytes": "100", f"{V1}/memory.limit_in_bytes": str(2**63 - 4096)},
            100,
        ),
        ("9:memory:/", {f"{V1}/memory.limit_in_bytes": str(2**63 - 4096)}, None),  # version 1 without a limit
        ("7:cpu:/a", {"sys/fs/cgroup/cpu/a/memory.limit_in_bytes": "1"}, None),
        (None, {"sys/fs/cgroup/memory.max": "1000"}, 1000),
        (None, {}, None),
    ],
)
def test_limit(tmp_path, group, files, limit):
    for name, text in {**files, **({} if group is None else {"proc/self/cgroup": group})}.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    assert memory_limit(tmp_path) == limit


def test_graders_start_no_more_processes_than_the_quota_keeps_busy(monkeypatch):
    started = []
    monkeypatch.setattr(joblib, "cpu_count", lambda: 3)
    monkeypatch.setattr("coca_mindspeed.grading.math.grader.Workers", lambda count, *_, **__: started.append(count))
    assert usable_cpus() == 3
    assert Machine().cpus == 3
    MathGrader()
    assert started == [3]
