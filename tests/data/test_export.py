"""Records as rows of other frameworks and back."""

import json

import pytest

from coca_mindspeed import cli
from coca_mindspeed.algorithm.methods import method_settings
from coca_mindspeed.algorithm.parsing import SYSTEM_PROMPTS
from coca_mindspeed.data.export import FRAMEWORKS, export_records, record_of
from coca_mindspeed.data.prompts import prompt_messages
from coca_mindspeed.data.records import write_records
from coca_mindspeed.errors import ConfigError, DataError
from tests.verl.configurations import record

PROMPT = SYSTEM_PROMPTS["first"]
RECORDS = [
    record(1),
    record(2, category="code", metadata={"tests": ["assert f(1) == 2\n"], "instruction": "\n\nWrite f."}, answer=""),
    record(3, category="factual", metadata={"aliases": ["Zürich", "\u2028", "1999-01-01"]}, answer="1999-01-01"),
    record(4, system="", metadata={"difficulty": 0.5, "big": 2**70}),
]
#: Where each framework looks for the chat, and the gold answer for its own reward functions.
CHAT = {"slime": "prompt", "swift": "messages", "trl": "prompt", "verl": "prompt"}
GOLD = {"slime": "label", "swift": "solution", "trl": "solution", "verl": "reward_model"}


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("thinking", [False, True])
def test_rows_carry_their_records_back(tmp_path, framework, thinking):
    write_records(tmp_path / "records.jsonl", RECORDS)
    arguments = ["--input", str(tmp_path / "records.jsonl"), "--output", str(tmp_path / "rows.jsonl")]
    assert (
        cli.main(["data", "export", framework, *arguments, "--prompt", "answer-first", *["--thinking"] * thinking]) == 0
    )
    prompt = method_settings("rlcr", thinking=thinking).system_prompt
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").open(encoding="utf-8")]
    assert [record_of(row.get("extra_info", row.get("metadata", row)), "here") for row in rows] == RECORDS
    assert [row[CHAT[framework]] for row in rows] == [prompt_messages(each, prompt) for each in RECORDS]
    gold = [row[GOLD[framework]] for row in rows]
    assert [g["ground_truth"] if isinstance(g, dict) else g for g in gold] == [each.answer for each in RECORDS]


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize(
    ("system", "expected"),
    [
        (None, PROMPT),
        ("", PROMPT),
        ("You are a pirate.", f"{PROMPT}\n\nYou are a pirate."),
        (f"You are a pirate.\n{PROMPT}", f"You are a pirate.\n{PROMPT}"),
        (f"{PROMPT.replace(' ', '  ')} Be brief.", f"{PROMPT.replace(' ', '  ')} Be brief."),
        ("First write <confidence> n </confidence>.", None),
        (SYSTEM_PROMPTS["last"], None),
    ],
)
def test_the_methods_prompt_is_part_of_each_system_message(tmp_path, capsys, framework, system, expected):
    write_records(tmp_path / "records.jsonl", [record(1), record(2, system=system)])
    arguments = ["--input", str(tmp_path / "records.jsonl"), "--output", str(tmp_path / "rows.jsonl")]
    assert cli.main(["data", "export", framework, *arguments]) == (expected is None)
    if expected is None:
        assert "'q2'" in capsys.readouterr().err
        assert not (tmp_path / "rows.jsonl").exists()
        return
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").open(encoding="utf-8")]
    assert [row[CHAT[framework]][0] for row in rows] == [
        {"role": "system", "content": content} for content in (PROMPT, expected)
    ]


@pytest.mark.parametrize("row", [None, {"index": 1}, {"record": "{"}, {"record": "[]"}, {"record": "{}"}])
def test_a_row_without_a_record_is_refused(row):
    with pytest.raises(DataError, match=r"^here"):
        record_of(row, "here")


def test_an_export_is_complete_or_absent_and_replaces_only_on_request(tmp_path):
    source, out = tmp_path / "records.jsonl", tmp_path / "out.jsonl"
    write_records(source, [record(1)])
    export_records("verl", source, out, None)
    before = out.read_bytes()
    with pytest.raises(DataError, match=str(out)):
        export_records("verl", source, out, None)
    with source.open("a") as file:
        file.write("{}\n")
    with pytest.raises(DataError, match=r"records.jsonl:2"):
        export_records("verl", source, out, None, overwrite=True)
    assert out.read_bytes() == before
    (tmp_path / "empty.jsonl").write_text("")
    for records, name, error in (
        ("empty.jsonl", "none.jsonl", DataError),
        ("records.jsonl", "none.parquet", ConfigError),
        ("records.jsonl", "absent/none.jsonl", DataError),
    ):
        with pytest.raises(error):
            export_records("verl", tmp_path / records, tmp_path / name, None)
        assert not (tmp_path / name).exists()
