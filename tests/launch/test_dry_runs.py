"""Plans and commands of dry runs, as ``dry_runs.txt`` has frozen them: each behind the command that prints it.

``python -m tests.launch.test_dry_runs`` writes the outputs anew; a new case is a line ``$ command`` in the file.
"""

import importlib.util
import os
import re
import shlex
import sys
from pathlib import Path
from unittest import mock

import pytest

from coca_mindspeed.mindspeed.start.driver import CHECKOUTS
from tests.frozen import compare
from tests.launch.scripts_for_tests import ROOT, call_here

TRANSCRIPT = Path(__file__).with_name("dry_runs.txt")
HAS_VERL = importlib.util.find_spec("verl") is not None


def cases() -> list[tuple[str, str]]:
    """Commands and their frozen outputs."""
    _, *parts = re.split(r"^\$ (.*)\n", TRANSCRIPT.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return list(zip(parts[::2], parts[1::2], strict=True))


def printed(command: str) -> str:
    """Standard output, errors and exit code of a command; tables without their lines, a row as ``cell | cell``."""
    *variables, script = shlex.split(command.partition(" -- ")[0])
    arguments = shlex.split(command.partition(" -- ")[2])
    environment = {**dict.fromkeys(CHECKOUTS, ""), **dict(variable.split("=", 1) for variable in variables)}
    with mock.patch.dict(os.environ, {"COLUMNS": "1000"}):
        ran = call_here(ROOT / script, *arguments, **environment)
    text = f"{ran.stdout}{ran.stderr}" + (f"exit code {ran.returncode}\n" if ran.returncode else "")
    lines = [line for line in text.rstrip().splitlines() if line[:1] not in set("┏┡┌├└")]
    rows = [
        " | ".join(map(str.strip, re.split("[│┃]", line)[1:-1])) if line[:1] in set("│┃") else line for line in lines
    ]
    shown = "\n".join(rows).replace(sys.executable, "PYTHON").replace(str(ROOT), "ROOT")
    return re.sub(r"'((?:PYTHON|ROOT)[^' ]*)'", r"\1", shown) + "\n\n"  # quoted where the checkout's path has a blank


@pytest.mark.usefixtures("verls_keys")
@pytest.mark.parametrize(("command", "frozen"), cases(), ids=[command for command, _ in cases()])
def test_dry_runs_print_what_is_frozen(command, frozen):
    if HAS_VERL and "verl.sh" in command:
        pytest.skip("verl's keys are those of its stub")
    compare(frozen, printed(command), __name__)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT / "tests" / "support" / "verl_stub"))
    TRANSCRIPT.write_text("".join(f"$ {command}\n{printed(command)}" for command, _ in cases()), encoding="utf-8")
