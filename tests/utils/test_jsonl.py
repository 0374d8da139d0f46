"""Logs with a row a step: cut back to a checkpoint, whatever a killed process left at their end."""

from pathlib import Path

import pytest

from coca_mindspeed.errors import DataError
from coca_mindspeed.utils.files import cut_back, read_steps


def log_of(tmp_path: Path, content: str) -> Path:
    path = tmp_path / "metrics.jsonl"
    path.write_text(content)
    return path


ROWS = '{"step": 1, "a": 0.1}\n{"step": 2, "a": null}\n{"step": 2, "b": 3}\n{"step": 10, "a": 1e-300}\n'


@pytest.mark.parametrize(
    ("content", "step", "left"),
    [
        (ROWS, 10, ROWS),
        (ROWS, 9, "".join(ROWS.splitlines(keepends=True)[:3])),
        (ROWS, 1, '{"step": 1, "a": 0.1}\n'),
        (ROWS, 0, ""),
        (ROWS + '{"step": 11, "a', 11, ROWS),
        (ROWS + '{"step": 11}', 11, ROWS),  # whole, but what is appended would stand on the same line
        ('{"step": 1', 5, ""),
        ("", 5, ""),
    ],
)
def test_what_came_after_a_checkpoint_goes_with_what_was_never_written_out(tmp_path, content, step, left):
    path = log_of(tmp_path, content)
    cut_back(path, step)
    assert path.read_text() == left


def test_a_log_in_which_nothing_is_wrong_is_not_written_anew(tmp_path):
    path = log_of(tmp_path, ROWS)
    before = path.stat().st_ino
    cut_back(path, 10)
    assert path.stat().st_ino == before
    cut_back(tmp_path / "none.jsonl", 3)
    assert list(tmp_path.iterdir()) == [path]  # a log that is missing is left missing
    path.write_text(ROWS + '{"step": 11, "a')
    assert [row["step"] for row in read_steps(path, torn_end=True)] == [1, 2, 2, 10]
    with pytest.raises(DataError, match=r":5: "):
        read_steps(path)


@pytest.mark.parametrize("line", ['{"step": ', '{"a": 1}', '{"step": 1.5}', "[1]"])
def test_damage_before_the_end_is_named_and_nothing_is_removed(tmp_path, line):
    path = log_of(tmp_path, f"{ROWS}{line}\n{ROWS}")
    with pytest.raises(DataError, match=r"metrics\.jsonl:5: expected"):
        cut_back(path, 1)
    assert path.read_text() == f"{ROWS}{line}\n{ROWS}"
