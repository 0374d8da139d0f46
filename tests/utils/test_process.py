"""Memory limits of control groups, and CPUs by the quota of a container."""

import os

import pytest

from coca_mindspeed.cli import main
from coca_mindspeed.grading.math.grader import MathGrader
from coca_mindspeed.upstream.machine import Machine
from coca_mindspeed.utils.process import memory_left, memory_limit, usable_cpus

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


@pytest.mark.parametrize(
    ("files", "left"),
    [
        ({}, None),
        ({"memory.max": "max", "memory.current": "900"}, None),
        # Another process uses 600 of it, and the cache of files can be dropped; that of a tmpfs (shmem) cannot.
        ({"memory.max": "1000", "memory.current": "600", "memory.stat": "anon 600"}, 400),
        (
            {
                "memory.max": "1000",
                "memory.current": "600",
                "memory.stat": "anon 200\nfile 400\nshmem 50\nactive_file 100\ninactive_file 250\n",
            },
            750,
        ),
        ({"memory.max": "1000", "memory.current": "1001", "memory.stat": ""}, 0),  # a limit that was lowered
        ({"a/memory.max": "1000", "a/memory.current": "900", "memory.max": "1500", "memory.current": "1000"}, 100),
        ({"a/memory.max": "1000", "a/memory.current": "100", "memory.max": "1500", "memory.current": "1450"}, 50),
    ],
)
def test_what_others_leave(tmp_path, files, left):
    for name, text in {"proc/self/cgroup": "0::/a", **{f"sys/fs/cgroup/{k}": v for k, v in files.items()}}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert memory_left(tmp_path) == left


def test_what_others_leave_by_version_1(tmp_path):
    """Its counts without total_ leave the groups below out."""
    group = tmp_path / V1 / "a"
    group.mkdir(parents=True)
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "self" / "cgroup").write_text("9:memory:/a\n")
    (group / "memory.limit_in_bytes").write_text("1000\n")
    (group / "memory.usage_in_bytes").write_text("700\n")
    (group / "memory.stat").write_text(
        "active_file 1\ninactive_file 2\ntotal_active_file 100\ntotal_inactive_file 200\n"
    )
    assert memory_left(tmp_path) == 600


@pytest.mark.parametrize(
    ("before", "spins"),
    [
        ({}, "10000"),
        ({"OMP_WAIT_POLICY": "passive"}, None),
        ({"OMP_WAIT_POLICY": "active"}, None),
        ({"GOMP_SPINCOUNT": "7"}, "7"),
    ],
)
def test_a_command_limits_spinning_unless_told_otherwise(monkeypatch, before, spins):
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.setenv(name, "")  # both are restored
        monkeypatch.delenv(name)
    for name, value in before.items():
        monkeypatch.setenv(name, value)
    assert main(["config", "list"]) == 0
    assert os.environ.get("GOMP_SPINCOUNT") == spins
    assert os.environ.get("OMP_WAIT_POLICY") == before.get("OMP_WAIT_POLICY")


def test_graders_start_no_more_processes_than_the_quota_keeps_busy(monkeypatch):
    started = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {5})
    monkeypatch.setattr("coca_mindspeed.grading.math.grader.Workers", lambda count, *_, **__: started.append(count))
    assert usable_cpus() == 1
    assert Machine().cpus == 1
    MathGrader()
    assert started == [1]


@pytest.mark.parametrize(
    ("group", "files", "cpus"),
    [
        ("0::/", {}, 8),
        ("0::/", {"sys/fs/cgroup/cpu.max": "max 100000"}, 8),
        ("0::/", {"sys/fs/cgroup/cpu.max": "150000 100000"}, 2),  # one and a half
        ("0::/a", {"sys/fs/cgroup/cpu.max": "300000 100000", "sys/fs/cgroup/a/cpu.max": "400000 100000"}, 3),
        ("0::/", {"sys/fs/cgroup/cpu.max": "1000 100000"}, 1),
        ("4:cpu,cpuacct:/a", {"sys/fs/cgroup/cpu/a/cpu.cfs_quota_us": "200000",
                              "sys/fs/cgroup/cpu/a/cpu.cfs_period_us": "100000"}, 2),
        ("4:cpu:/", {"sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1", "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000"}, 8),
    ],
)  # fmt: skip
def test_cpus_by_affinity_and_quota(tmp_path, monkeypatch, group, files, cpus):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    for name, text in {**files, "proc/self/cgroup": group}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    assert usable_cpus(tmp_path) == cpus
