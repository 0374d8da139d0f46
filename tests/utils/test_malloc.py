"""The restart of a training command with jemalloc: when, what child processes inherit, and equal results."""

import json
import os
import subprocess
import sys

import pytest

from coca_mindspeed.utils import process
from coca_mindspeed.utils.process import SWITCH, find_jemalloc

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
