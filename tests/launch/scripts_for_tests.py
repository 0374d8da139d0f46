"""Scripts are run as a user does, and what they started is watched."""

import os
import subprocess
import sys
import time
from pathlib import Path


def call(script: Path, *arguments: str, timeout: float = 300, **environment: str) -> subprocess.CompletedProcess[str]:
    variables = {**os.environ, "PYTHON": sys.executable, **environment}
    command = ["bash", str(script), *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=variables, timeout=timeout, check=False)


def until(path: Path) -> None:
    deadline = time.monotonic() + 200
    while not (path.exists() and path.read_text().endswith("\n")):
        assert time.monotonic() < deadline, f"{path} was not written"
        time.sleep(0.05)


def ended(pid: int) -> bool:
    """Whether a process that is not our child is gone; nobody may have reaped it yet."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.05)
    return False
