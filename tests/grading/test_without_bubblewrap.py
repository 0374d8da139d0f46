"""On a machine without bubblewrap, tests that run programs are skipped, and tests beside them pass."""

import os
import subprocess
import sys
from pathlib import Path

from tests.grading.sandbox_package import REPOSITORY

TESTS = [
    *(f"grading/test_{name}.py" for name in ("code", "forged_answers", "sandbox", "two_graders")),
    "baselines/test_majority_vote.py::test_programs_without_a_plain_call_in_their_tests_agree_by_their_text",
    "baselines/test_majority_vote.py::test_programs_are_the_same_if_their_outputs_are",
    "grading/test_inherited_limits.py::test_programs_are_graded_under_inherited_limits",
    "grading/test_label_check.py::test_what_no_answer_can_be_graded_by_is_refused_with_file_and_line[bad9]",
    "grading/test_outcomes.py::test_programs",
]


def test_tests_of_programs_are_skipped(tmp_path: Path) -> None:
    for folder in map(Path, os.environ["PATH"].split(os.pathsep)):
        for program in folder.iterdir() if folder.is_dir() else ():
            if program.name != "bwrap" and not (tmp_path / program.name).is_symlink():
                (tmp_path / program.name).symlink_to(program)
    command = [sys.executable, "-m", "pytest", "-q", "-m", "not slow", "-p", "no:cacheprovider"]
    ran = subprocess.run(
        [*command, *(f"tests/{test}" for test in TESTS)],
        cwd=REPOSITORY,
        env={**os.environ, "PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout[-3000:]
    assert " skipped" in ran.stdout.splitlines()[-1]
