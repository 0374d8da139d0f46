"""On a machine without bubblewrap, the tests of programs are skipped, and all others pass."""

import os
import subprocess
import sys
from pathlib import Path

from tests.grading.sandbox_package import REPOSITORY

FILES = ["busy_machine", "code", "forged_answers", "inherited_limits", "outcomes", "registry", "sandbox", "two_graders"]


def test_tests_of_programs_are_skipped(tmp_path: Path) -> None:
    for folder in map(Path, os.environ["PATH"].split(os.pathsep)):
        for program in folder.iterdir() if folder.is_dir() else ():
            if program.name != "bwrap" and not (tmp_path / program.name).is_symlink():
                (tmp_path / program.name).symlink_to(program)
    files = [f"tests/grading/test_{name}.py" for name in FILES] + ["tests/verl/test_reward_queue.py"]
    command = [sys.executable, "-m", "pytest", "-q", "-m", "not slow", "-p", "no:cacheprovider", *files]
    environment = {**os.environ, "PATH": str(tmp_path)}
    ran = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout[-3000:]
    assert " skipped" in ran.stdout.splitlines()[-1]
