"""``coca-mindspeed data`` as it is typed."""

import json
import re

import pytest

from coca_mindspeed.cli import main
from coca_mindspeed.data.records import Record, read_records, write_records
from tests.data import source_rows
from tests.data.test_prepare import big_math_row, findings, write_jsonl
from tests.tokenizers_for_tests import qwen_like


def run(*arguments):
    return main(["data", *map(str, arguments)])


def test_prepare_with_every_filter(tmp_path, capsys):
    qwen_like().save_pretrained(tmp_path / "tokenizer")
    passage = "a quick brown fox jumps over one lazy dog each and every day"
    big_math = write_jsonl(
        tmp_path / "big.jsonl",
        [
            big_math_row("What is two and two?", "4"),
            big_math_row("What is two and three?", "5", rate=0.0),
            big_math_row("What is two and four?", "6", source="web"),
            big_math_row(f"Prove that {passage}", "7"),
            big_math_row("Why? " * 200, "8"),
            big_math_row("Once upon a time and a very good time it was there was a moocow coming down", "9"),
        ],
    )
    gsm8k = write_jsonl(tmp_path / "test.jsonl", [{"question": f"If {passage}, why?", "answer": "#### 1"}])
    write_records(
        tmp_path / "own.jsonl", [Record("o", "own", "math", "once upon a time and a very good time it was there", "1")]
    )
    assert (
        run(
            *("prepare", "big_math", "--input", big_math, "--output", tmp_path / "out"),
            *("--difficulty", 0.1, 0.9, "--exclude-source", "web", "--validation", 0, "--seed", 3),
            *("--tokenizer", tmp_path / "tokenizer", "--max-tokens", 500),
            *("--decontaminate", f"gsm8k={gsm8k}", "--decontaminate", tmp_path / "own.jsonl", "--ngram", 10),
        )
        == 0
    )
    assert [record.answer for record in read_records(tmp_path / "out" / "train.jsonl")] == ["4"]
    assert {f["row"]: (f["stage"], f["reason"]) for f in findings(tmp_path / "out")} == {
        2: ("difficulty", "above 0.9"),
        3: ("source", "web"),
        4: ("contamination", "gsm8k"),
        5: ("length", "prompt longer than 500 tokens"),
        6: ("contamination", "own"),
    }
    printed = capsys.readouterr().out
    assert "big_math: 6 rows in, 1 rows out" in printed
    assert re.search(r"dropped, contamination \(.*\): 2", printed)
    options = json.loads((tmp_path / "out" / "report.json").read_text())["options"]
    assert (options["difficulty"], options["ngram"], options["seed"]) == ([0.1, 0.9], 10, 3)


@pytest.mark.parametrize(
    ("dataset", "rows", "count"),
    [
        ("taco", [source_rows.taco_row(), source_rows.TACO_CALL], 2),
        ("gsm8k", source_rows.GSM8K, 2),
        ("math500", source_rows.MATH500, 1),
        ("aime24", list(source_rows.AIME.values()), 6),
        ("aime25", list(source_rows.AIME.values())[:1], 1),
        ("mbpp_sanitized", [source_rows.mbpp_row(10), source_rows.mbpp_row(11)], 1),
        ("humaneval", source_rows.HUMANEVAL, 1),
        ("simpleqa", source_rows.SIMPLEQA, 1),
        ("triviaqa", [source_rows.TRIVIAQA_HUB], 1),
        ("records", [{"question": "q?", "answer": "1"}], 1),
    ],
)
def test_every_data_set_prepares(tmp_path, dataset, rows, count):
    """Also shows that benchmarks are not cleaned: AIME's six spellings of one problem all stay."""
    path = write_jsonl(tmp_path / "rows.jsonl", rows)
    assert run("prepare", dataset, "--input", path, "--output", tmp_path / "out") == 0
    name = "train" if dataset in ("taco", "records") else "test"
    assert len(list(read_records(tmp_path / "out" / f"{name}.jsonl"))) == count


@pytest.mark.parametrize(
    ("arguments", "named", "code"),
    [
        (("--input", "none.parquet"), "none.parquet", 1),
        (("--decontaminate", "gsm9k=x"), "'gsm8k'", 1),
        (("--decontaminate", "gsm8k=nowhere.jsonl"), "nowhere.jsonl: ", 1),
        (("--tokenizer", "x", "--max-tokens", "9"), "x: ", 1),
        *(
            (tuple(words.split()), words.split()[0], 2)
            for words in (
                "--max-tokens 9",
                "--tokenizer x",
                "--difficulty 0.9 0.1",
                "--difficulty nan 1",
                "--validation nan",
                "--ngram 3",
                f"--skip-bad {'9' * 5000}",
            )
        ),
    ],
)
def test_errors_name_the_option_or_file(tmp_path, capsys, monkeypatch, arguments, named, code):
    monkeypatch.chdir(tmp_path)
    write_jsonl(tmp_path / "rows.jsonl", [])
    given = () if "--input" in arguments else ("--input", "rows.jsonl")
    try:
        found = run("prepare", "big_math", "--output", tmp_path / "out", *given, *arguments)
    except SystemExit as stopped:
        found = stopped.code
    assert found == code
    error = capsys.readouterr().err
    assert named in error
    assert code == 2 or len(error.splitlines()) == 1
    assert not (tmp_path / "out").exists()
