"""Signals and the log of a process that starts a cluster run."""

import signal
import subprocess
import sys

import pytest

from coca_mindspeed.upstream.launch import ending_by_signals

ENDING = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)


@pytest.mark.parametrize("number", ENDING)
def test_the_exit_code_names_the_first_signal(number, handlers):
    """Ray replaces our exception by one with its own exit code."""
    signal.signal(number, signal.SIG_DFL)  # as the test runner may ignore it

    def train_by_ray() -> None:
        try:
            signal.raise_signal(number)
        finally:
            for again in ENDING:
                signal.raise_signal(again)
            raise SystemExit(1)

    with pytest.raises(SystemExit) as ended, ending_by_signals():
        train_by_ray()
    assert ended.value.code == 128 + number


def test_without_a_signal_the_handlers_are_put_back(handlers):
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # by nohup
    with ending_by_signals():
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        assert signal.getsignal(signal.SIGTERM) is not handlers[signal.SIGTERM]
    assert signal.getsignal(signal.SIGTERM) is handlers[signal.SIGTERM]


def test_the_log_has_everything_and_is_not_held_up(tmp_path):
    """Native output, a child's, the traceback at the end; a process that outlives this one does not hold it up."""
    code = """
import os, subprocess, sys
from pathlib import Path
from coca_mindspeed.upstream.launch import open_log
open_log(Path(sys.argv[1]), 3)
os.write(1, b"native\\n")
subprocess.run(["bash", "-c", "echo child >&2"])
subprocess.Popen(["sleep", "400"])
raise RuntimeError("the last line")
"""
    command = [sys.executable, "-c", code, str(tmp_path)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 1
    [log] = (tmp_path / "logs").iterdir()
    assert log.name.endswith("-node3.log")
    assert {"native", "child", "RuntimeError: the last line"} <= {*log.read_text().splitlines()}
    assert "native" in ran.stdout
    assert {"child", "RuntimeError: the last line"} <= {*ran.stderr.splitlines()}
