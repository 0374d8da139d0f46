"""The sandbox's package, where an unprivileged user can read it."""

import os
import shutil
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
NOBODY = 65534


def sandbox_problem():
    """Why no sandbox can be made here, or ``""``."""
    from coca_sandbox.sandbox import Sandbox, SandboxError

    try:
        Sandbox()
    except SandboxError as error:
        return str(error)
    return ""


def python_for_everybody():
    """An interpreter that an unprivileged user may start (not one below /root)."""
    for candidate in (getattr(sys, "_base_executable", sys.executable), "/usr/bin/python3", "/usr/local/bin/python3"):
        code = "import sys; sys.exit(sys.version_info < (3, 10))"
        try:
            done = subprocess.run([candidate, "-c", code], user=NOBODY, group=NOBODY, extra_groups=[], check=False)
        except OSError:
            continue
        if done.returncode == 0:
            return candidate
    return None


needs_sandbox = pytest.mark.skipif(bool(problem := sandbox_problem()), reason=f"no sandbox here: {problem:.120}")


@contextmanager
def copied_package(*files):
    """A directory that holds the sandbox's package, and files of these tests beside it."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        directory.chmod(0o755)
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(REPOSITORY / "coca_sandbox", directory / "coca_sandbox", ignore=ignored)
        for file in files:
            shutil.copy(REPOSITORY / "tests/grading" / file, directory)
        yield directory


@contextmanager
def script_of(user, name, *others):
    """Command and ``Popen`` options that run a script of these tests as ``this user`` or as ``nobody``."""
    if user == "this user":
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
        yield [sys.executable, str(REPOSITORY / "tests/grading" / name)], {"env": environment}
        return
    if os.geteuid() != 0:
        pytest.skip("these tests run as a normal user already")
    if (python := python_for_everybody()) is None:
        pytest.skip("no Python 3.10 or newer that an unprivileged user may start")
    with copied_package(name, *others) as directory:
        user_ids = {"user": NOBODY, "group": NOBODY, "extra_groups": []}
        environment = {"PATH": os.environ["PATH"], "HOME": "/"}
        yield [python, f"{directory}/{name}"], {**user_ids, "cwd": directory, "env": environment}
