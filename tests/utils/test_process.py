"""Memory limits of control groups, CPUs by the quota of a container, and the restart with jemalloc."""

import json
import os
import subprocess
import sys

import joblib
import pytest

from coca_mindspeed.grading.math.grader import MathGrader
from coca_mindspeed.mindspeed.doctor import Machine
from coca_mindspeed.utils import process
from coca_mindspeed.utils.process import SWITCH, find_jemalloc, memory_limit, usable_cpus

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
    assert Machine().cpus() == 3
    MathGrader()
    assert started == [3]


JEMALLOC = find_jemalloc()
needs_jemalloc = pytest.mark.skipif(JEMALLOC is None or sys.platform != "linux", reason="libjemalloc2 is not installed")
OTHER = "libm.so.6"  # a library that is preloaded for another purpose
ASKS = """
import json, os, subprocess, sys
from coca_mindspeed.utils.process import restart_with_jemalloc, uses_jemalloc
restart_with_jemalloc()
child = subprocess.run([sys.executable, "-c", "import ctypes; print(hasattr(ctypes.CDLL(None), 'mallctl'))"],
                       capture_output=True, text=True, check=True)
print(json.dumps([uses_jemalloc(), os.environ.get("LD_PRELOAD"), child.stdout.strip() == "True", sys.argv[1:]]))
"""


def clean_environment(**more):
    others = (*process._GLIBC_SETTINGS, "LD_PRELOAD", "MALLOC_CONF", SWITCH)
    return {name: value for name, value in os.environ.items() if name not in others} | more


@needs_jemalloc
@pytest.mark.parametrize(
    ("environment", "used", "preloaded", "inherited"),
    [
        ({}, True, None, False),
        ({"LD_PRELOAD": OTHER}, True, OTHER, False),
        ({"LD_PRELOAD": str(JEMALLOC)}, True, str(JEMALLOC), True),  # the user's own
        ({SWITCH: "0"}, False, None, False),
        ({"MALLOC_TRIM_THRESHOLD_": "131072"}, False, None, False),
        # A system that ignores LD_PRELOAD: the restarted process does not start again.
        ({process._RESTARTED: '{"LD_PRELOAD": null}'}, False, None, False),
    ],
)
def test_jemalloc_is_used_unless_the_user_chose_and_is_not_inherited(environment, used, preloaded, inherited):
    command = [sys.executable, "-c", ASKS, "one word", "--flag"]
    done = subprocess.run(command, env=clean_environment(**environment), capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [used, preloaded, inherited, ["one word", "--flag"]]


def test_nothing_is_started_without_the_library(monkeypatch):
    monkeypatch.setattr(os, "environ", clean_environment())
    monkeypatch.setattr(process, "find_jemalloc", lambda: None)
    monkeypatch.setattr(os, "execve", lambda *_: pytest.fail("restarted"))
    process.restart_with_jemalloc()
