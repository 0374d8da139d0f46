"""Starting the driver as users do, and reading what a run leaves behind."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.integration.mindspeed import tiny
from tests.integration.mindspeed.environment import REPOSITORY, environment


def start_driver(
    directory: Path, config: dict[str, Any], ray_directory: str, **variables: str
) -> subprocess.Popen[bytes]:
    """Start the driver on ``config``, its output appended to ``directory/log``."""
    path = tiny.write_configuration(directory / "run.yaml", config)
    with (directory / "log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "coca_mindspeed.mindspeed.start.driver", str(path)],
            cwd=REPOSITORY,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment(RAY_TMPDIR=ray_directory, **variables),
        )


def finish(process: subprocess.Popen[bytes], directory: Path, timeout: float = 900) -> str:
    """Wait for a run; its log, and a failed test if it failed."""
    try:
        code = process.wait(timeout=timeout)
    finally:
        process.kill()
    log = (directory / "log").read_text(errors="replace")
    if code:
        pytest.fail(f"the run returned {code}; the end of its log:\n{log[-4000:]}")
    return log


def json_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def metrics_of(directory: Path, name: str = "metrics.jsonl") -> list[dict[str, float]]:
    """The lines of a file that a run of :func:`start_driver` wrote."""
    return json_lines(directory / "output" / name)


def copy_of(warm: Path, target: Path) -> Path:
    """A run's own copy of a warmed-up folder."""
    shutil.copytree(warm, target, dirs_exist_ok=True)
    return target
