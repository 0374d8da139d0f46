"""The output appears whole or not at all, also when the process is killed."""

import json
import subprocess
import sys

import pytest

from coca_mindspeed.errors import DataError
from coca_mindspeed.utils.directories import MARKER, output_directory


def make(path, overwrite=False, content="x"):
    with output_directory(path, overwrite) as directory:
        (directory / "data").write_text(content)


def fail_in_the_middle(path, overwrite):
    with output_directory(path, overwrite) as directory:
        (directory / "data").write_text("half")
        raise KeyError


def names(path):
    return sorted(child.name for child in path.iterdir())


def test_a_directory_is_replaced_whole_or_not_at_all(tmp_path):
    with pytest.raises(KeyError):
        fail_in_the_middle(tmp_path / "out", overwrite=False)
    assert names(tmp_path) == []
    (tmp_path / "out").mkdir()  # an empty directory is free
    make(tmp_path / "out", content="old")
    with pytest.raises(KeyError):
        fail_in_the_middle(tmp_path / "out", overwrite=True)
    assert (names(tmp_path), (tmp_path / "out" / "data").read_text()) == (["out"], "old")
    assert names(tmp_path / "out") == [MARKER, "data"]
    (tmp_path / "out" / "validation.jsonl").touch()
    make(tmp_path / "out", overwrite=True, content="new")
    assert names(tmp_path) == ["out"]
    assert names(tmp_path / "out") == [MARKER, "data"]
    assert (tmp_path / "out" / "data").read_text() == "new"


def test_taken_places_are_refused(tmp_path):
    make(tmp_path / "out")
    with pytest.raises(DataError, match="--overwrite"):
        make(tmp_path / "out")
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").touch()
    for marker in ({}, {"made_by": "somebody"}, {"made_by": "coca-mindspeed", "kind": "run"}, [], "not JSON"):
        # A stranger's folder may well hold a report.json, and even a file by our marker's name.
        (tmp_path / "home" / "report.json").write_text("{}")
        (tmp_path / "home" / MARKER).write_text(json.dumps(marker))
        with pytest.raises(DataError, match=r"coca-mindspeed\.json"):
            make(tmp_path / "home", overwrite=True)
    with pytest.raises(DataError, match=r"thesis\.tex"):
        make(tmp_path / "home" / "thesis.tex", overwrite=True)
    assert names(tmp_path / "home") == [MARKER, "report.json", "thesis.tex"]


_KILLED_BETWEEN_THE_RENAMES = """
import os, signal, sys
from pathlib import Path
from coca_mindspeed.utils.directories import output_directory
rename, calls = Path.rename, []
def dies(self, target):
    calls.append(self)
    if len(calls) == int(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGKILL)
    return rename(self, target)
with output_directory(Path(sys.argv[1]), True) as directory:
    (directory / "data").write_text("new")
    Path.rename = dies
"""


@pytest.mark.parametrize("at", [1, 2])
def test_a_process_killed_while_replacing_loses_nothing(tmp_path, at):
    make(tmp_path / "out", content="old")
    arguments = [sys.executable, "-c", _KILLED_BETWEEN_THE_RENAMES, str(tmp_path / "out"), str(at)]
    assert subprocess.run(arguments, check=False).returncode == -9
    assert (at == 2) == (not (tmp_path / "out").exists())
    with pytest.raises(DataError, match="--overwrite"):  # the earlier output is back, and is not overwritten
        make(tmp_path / "out")
    assert (tmp_path / "out" / "data").read_text() == "old"
    make(tmp_path / "out", overwrite=True, content="newest")
    [left, out] = names(tmp_path)
    assert left.startswith(".out.partial-")
    assert out == "out"
