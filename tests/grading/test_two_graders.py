"""Two grading processes on one machine do not disturb each other, and a machine that is full makes nothing wrong."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from coca_sandbox import sandbox as sandbox_module
from coca_sandbox.sandbox import Sandbox, SandboxError, locked_user_id
from tests.grading.sandbox_package import needs_sandbox, script_of

pytestmark = [needs_sandbox, pytest.mark.timing]
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root has several user ids")


@pytest.mark.parametrize("user", ["this user", "nobody"])
def test_programs_that_use_all_their_processes_stay_right(user):
    with script_of(user, "greedy_programs.py") as (command, options):
        graders = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, **options) for _ in range(2)]
        for grader in graders:
            said, _ = grader.communicate()
            assert json.loads(said) == [["right", ""]] * 4


@needs_root
def test_a_user_id_is_taken_until_the_last_holder_of_its_lock_ends(monkeypatch):
    monkeypatch.setattr(sandbox_module, "_RANGES", ((1_900_000_000, 2),))
    with locked_user_id() as (first, lock):
        with locked_user_id() as (second, _):
            assert {first, second} == {1_900_000_000, 1_900_000_001}
            with pytest.raises(SandboxError, match="in use"), locked_user_id():
                pass
        holder = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=[lock])
    for _ in range(20):
        with locked_user_id() as (free, _):
            assert free == second
    holder.communicate(b"\n")
    found = set()
    for _ in range(50):
        with locked_user_id() as (free, _):
            found.add(free)
    assert found == {first, second}


@needs_root
def test_a_directory_of_locks_that_somebody_else_made_is_not_used(monkeypatch, tmp_path):
    elsewhere = tmp_path / "coca-mindspeed-user-ids"
    elsewhere.mkdir()
    elsewhere.chmod(0o777)
    monkeypatch.setattr(sandbox_module, "Path", lambda name: tmp_path if name == "/run" else Path(name))
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    with pytest.raises(SandboxError, match="can be used"), locked_user_id():
        pass


def test_what_a_case_leaves_behind_does_not_count_against_the_next():
    source = """
import os, time
print(input())
for _ in range(24):
    if os.fork() == 0:
        for number in (1, 2): os.close(number)
        time.sleep(100)
"""
    cases = [{"input": str(number), "output": str(number)} for number in range(4)]
    report = Sandbox().run({"kind": "stdio", "source": source, "cases": cases, "seconds": 5.0}, 20.0)
    assert (report.outcome, report.reason) == ("right", "")
