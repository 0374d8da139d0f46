"""Scripts are run as a user does, or in this process; what they started is watched."""

import contextlib
import io
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from subprocess import CompletedProcess
from unittest import mock

import pytest

from coca_mindspeed.cli import main
from coca_mindspeed.mindspeed import conversion
from tests.support.waiting import until

ROOT = Path(__file__).parents[2]


def call(script: Path, *arguments: str, cwd: Path | None = None, **environment: str) -> CompletedProcess[str]:
    return run(["bash", str(script), *arguments], cwd, environment)


def call_here(script: Path, *arguments: str, cwd: Path | None = None, **environment: str) -> CompletedProcess[str]:
    """Run the command of a script in this process, in a fifth of the time: for calls that start nothing."""
    exported = {"COCA_LAUNCH_SCRIPT": str(script), "COCA_MINDSPEED_CPU_SHIM": "tests.support.mindspeed_host"}
    before, out, err = Path.cwd(), io.StringIO(), io.StringIO()
    with (
        mock.patch.dict(os.environ, {**exported, "PYTHON": sys.executable, **environment}),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        os.chdir(cwd or before)
        try:
            if script.stem == "convert_weights":
                code = conversion.main(arguments)
            else:
                code = main(["launch", *([] if script.stem in ("run", "verl") else [script.stem]), *arguments])
        except SystemExit as end:  # of argparse
            code = int(end.code or 0)
        finally:
            os.chdir(before)
    return CompletedProcess(arguments, code, out.getvalue(), err.getvalue())


def shell(steps: str, **environment: str) -> CompletedProcess[str]:
    """Run steps in a shell like that of the launch scripts."""
    return run(["bash", "-euo", "pipefail", "-c", f'. "{ROOT}/launch/lib.sh"; {steps}'], ROOT, environment)


def run(command: list[str], cwd: Path | None, environment: Mapping[str, str]) -> CompletedProcess[str]:
    variables = {**os.environ, "PYTHON": sys.executable, **environment}
    return subprocess.run(command, capture_output=True, text=True, env=variables, timeout=300, check=False, cwd=cwd)


def own_address() -> str:
    """An address of this machine that other machines could reach; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
            return str(probe.getsockname()[0])
        except OSError:
            pytest.skip("this machine has no address but its loopback")


def commands(output: str) -> list[str]:
    return [line for line in output.splitlines() if line.startswith("+")]


def written(path: Path) -> None:
    """Wait until a file ends with a whole line."""
    until(lambda: path.exists() and path.read_text().endswith("\n"), seconds=200)


def ended(pid: int) -> bool:
    """Whether a process that is not our child is gone; nobody may have reaped it yet."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.05)
    return False
