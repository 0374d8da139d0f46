"""JSON that is always written, and read back as it was."""

import json

import pytest

from coca_mindspeed.files import read_json_lines, write_json, write_json_lines

TEXTS = ["\ud83d", "a\udc00b", "\U0001f600 half: \ude00", "\\ud83d spelt out", "🙂", "\u2028"]


@pytest.mark.parametrize("text", TEXTS, ids=ascii)
def test_what_utf8_cannot_hold_is_escaped_and_comes_back(tmp_path, text):
    write_json_lines(tmp_path / "rows.jsonl", [{text: text}, {"next": 1}])
    write_json(tmp_path / "value.json", {"x": text})
    assert [row for _, row in read_json_lines(tmp_path / "rows.jsonl")] == [{text: text}, {"next": 1}]
    assert json.loads((tmp_path / "value.json").read_text()) == {"x": text}
