"""``coca-mindspeed data`` as it is typed."""

import pytest

from coca_mindspeed.cli import main
from coca_mindspeed.data.records import read_records
from tests.data import source_rows
from tests.data.test_prepare import write_jsonl


def run(*arguments):
    return main(["data", *map(str, arguments)])


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
        ("hotpotqa", [source_rows.HOTPOTQA_AUTHORS, source_rows.HOTPOTQA_AUTHORS | {"_id": "2"}], 2),
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
        (("--decontaminate", "nowhere.jsonl"), "nowhere.jsonl: ", 1),
        (("--tokenizer", "x", "--max-tokens", "9"), "x: ", 1),
        *(
            (tuple(words.split()), words.split()[0], 2)
            for words in (
                "--max-tokens 9",
                "--tokenizer x",
                "--difficulty 0.9 0.1",
                "--difficulty nan 1",
                "--validation nan",
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
