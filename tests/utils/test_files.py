"""JSON that is read back as it was, logs that are cut back to a checkpoint, directories that are whole or absent."""

import errno
import json
import os
from pathlib import Path

import pytest

from coca_mindspeed.errors import DataError
from coca_mindspeed.utils.files import naming, whole_directory, write_atomically
from coca_mindspeed.utils.json_files import cut_back, read_json_lines, read_steps, write_json, write_json_lines

TEXTS = ["\ud83d", "a\udc00b", "\U0001f600 half: \ude00", "\\ud83d spelt out", "🙂", "\u2028"]


@pytest.mark.parametrize("text", TEXTS, ids=ascii)
def test_what_utf8_cannot_hold_is_escaped_and_comes_back(tmp_path, text):
    write_json_lines(tmp_path / "rows.jsonl", [{text: text}, {"next": 1}])
    write_json(tmp_path / "value.json", {"x": text})
    assert [row for _, row in read_json_lines(tmp_path / "rows.jsonl")] == [{text: text}, {"next": 1}]
    assert json.loads((tmp_path / "value.json").read_text()) == {"x": text}


def write_whole(path, content, *, fails=False):
    with whole_directory(path) as writing:
        (writing / "file").write_text(content)
        assert not (path / "file").exists() or (path / "file").read_text() != content
        if fails:
            raise KeyboardInterrupt


def test_a_directory_is_replaced_whole_or_not_at_all(tmp_path):
    path = tmp_path / "new" / "model"
    with pytest.raises(KeyboardInterrupt):
        write_whole(path, "0", fails=True)
    assert list(path.parent.iterdir()) == []
    path.mkdir()  # an empty directory gives way
    for content in ("1", "2"):
        write_whole(path, content)
    with pytest.raises(KeyboardInterrupt):
        write_whole(path, "3", fails=True)
    assert (path / "file").read_text() == "2"
    assert [p.name for p in path.parent.iterdir()] == ["model"]


def test_private_files_of_a_library_are_anybodys_as_the_others_are(tmp_path):
    """Safetensors makes files that another user, such as a server's, cannot read."""
    before = os.umask(0o027)
    try:
        with whole_directory(tmp_path / "model") as writing:
            for name, mode in (("weights", 0o600), ("script", 0o755), ("config", 0o664)):
                (writing / name).touch()
                (writing / name).chmod(mode)
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "model").iterdir()}
    assert modes == {"weights": 0o640, "script": 0o755, "config": 0o664}


@pytest.mark.parametrize("calls", [1, 2])
def test_what_stood_there_comes_back_if_a_rename_fails(tmp_path, monkeypatch, calls):
    path, rename, left = tmp_path / "model", Path.rename, [calls]
    write_whole(path, "1")

    def fails(self, target):
        left[0] -= 1
        if left[0] == 0:
            raise OSError(28, "No space left on device")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fails)
    with pytest.raises(OSError, match="No space left"):
        write_whole(path, "2")
    assert (path / "file").read_text() == "1"
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


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


def test_a_full_disk_is_named_by_the_file(tmp_path, monkeypatch):
    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space left") as raised:
        write_atomically(tmp_path / "metrics.json", "{}")
    assert (raised.value.errno, raised.value.filename) == (errno.ENOSPC, str(tmp_path / "metrics.json"))
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(FileNotFoundError) as missing, naming(tmp_path):
        (tmp_path / "absent").read_bytes()
    assert missing.value.filename == str(tmp_path / "absent")
