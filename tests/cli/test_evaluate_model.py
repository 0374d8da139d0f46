"""`evaluate MODEL --data FILE`, and `collect MODEL`: responses are sampled, kept, resumed and graded."""

import csv
import json
import shutil

import pytest

from coca_mindspeed.cli import main
from coca_mindspeed.data.arithmetic import arithmetic_records
from coca_mindspeed.evaluation.predictions import read_predictions

COUNT = 12


@pytest.fixture
def questions(tmp_path):
    """A CSV file with the columns that `train` reads."""
    path = tmp_path / "heldout.csv"
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["question", "answer", "category"])
        rows.writerows(
            [record.question, record.answer, record.category] for record in arithmetic_records(COUNT, "evaluate", 5)
        )
    return path


@pytest.fixture
def evaluate(finished_demo, questions):
    def command(output, *more, model=finished_demo):
        options = ["--data", questions, "--output", output, "--device", "cpu", "--concurrency", "5", *more]
        return main(["evaluate", *map(str, [model, *options])])

    return command


def rows(output):
    return [json.loads(line) for line in (output / "responses.jsonl").read_text().splitlines()]


def test_a_run_is_asked_and_evaluated(evaluate, tmp_path, capsys):
    assert evaluate(tmp_path / "out", "--samples", "2") == 0
    predictions = read_predictions(tmp_path / "out" / "predictions.jsonl")
    assert [(p.id, p.sample) for p in predictions] == [(f"heldout-{n}", s) for n in range(1, COUNT + 1) for s in (0, 1)]
    asked = rows(tmp_path / "out")
    assert [row["confidence"] for row in asked] == [p.confidence for p in predictions]
    assert {len(row["form"]) for row in asked} == {16}
    stated = [row for row in asked if row["confidence"] is not None]
    assert all(0 < row["tokens_to_confidence"] <= row["tokens"] for row in stated)
    written = json.loads((tmp_path / "out" / "metrics.json").read_text())
    assert list(written["results"]) == ["coca"]
    assert "GiB" in capsys.readouterr().err


def test_a_stopped_command_continues_with_the_same_responses(evaluate, tmp_path, monkeypatch):
    assert evaluate(tmp_path / "whole") == 0
    shutil.copytree(tmp_path / "whole", tmp_path / "part")
    kept = (tmp_path / "whole" / "responses.jsonl").read_text().splitlines(keepends=True)[:5]
    (tmp_path / "part" / "responses.jsonl").write_text("".join(kept) + '{"id": "to')
    assert evaluate(tmp_path / "part") == 0
    assert rows(tmp_path / "part") == rows(tmp_path / "whole")
    monkeypatch.setattr("coca_mindspeed.local.load.load_policy", None)
    assert evaluate(tmp_path / "part") == 0  # complete: the weights are not read


def test_other_settings_are_refused(evaluate, tmp_path, finished_demo, capsys):
    assert evaluate(tmp_path / "out") == 0
    for more in (["--seed", "1"], ["--max-tokens", "7"], ["--samples", "2"]):
        assert evaluate(tmp_path / "out", *more) == 1
        assert more[0] in capsys.readouterr().err
    assert evaluate(tmp_path / "out", model=finished_demo / "untrained") == 1


def test_collect_gives_the_same_responses_as_an_export(evaluate, finished_demo, questions, tmp_path):
    assert evaluate(tmp_path / "out") == 0
    assert main(["export", str(finished_demo), "--output", str(tmp_path / "export")]) == 0
    renamed = tmp_path / "heldout.tsv"
    renamed.write_text(questions.read_text().replace(",", "\t").replace("question\tanswer", "task\tsolution"))
    options = ["--columns", '{"question": "task", "answer": "solution", "category": "category"}', "--concurrency", 5]
    options += ["--data", renamed, "--output", tmp_path / "collected", "--device", "cpu"]
    assert main(["collect", *map(str, [tmp_path / "export", *options])]) == 0
    assert rows(tmp_path / "collected") == rows(tmp_path / "out")
    assert len((tmp_path / "collected" / "records.jsonl").read_text().splitlines()) == COUNT


def test_too_many_responses_for_the_memory_are_refused_before_the_weights_are_read(
    evaluate, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr("coca_mindspeed.local.collect.free_bytes", lambda device: 1000)
    monkeypatch.setattr("coca_mindspeed.local.load.load_policy", None)
    assert evaluate(tmp_path / "out") == 1
    printed = capsys.readouterr().err
    assert "--concurrency=5: " in printed
    assert "[memory-rollout]" in printed
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "arguments",
    [
        ["evaluate", "x.jsonl", "--samples", "2"],
        ["evaluate", "x.jsonl", "--seed", "0"],
        ["evaluate", "a", "b", "--data", "x.jsonl"],
        ["evaluate", "a", "--data", "x.jsonl", "--gold", "y.jsonl"],
        ["collect", "a", "--data", "x.jsonl", "--output", "o", "--model", "m"],
        ["collect", "http://127.0.0.1:9/v1", "--data", "x.jsonl", "--output", "o"],
        ["collect", "http://127.0.0.1:9/v1", "--model", "m", "--data", "x.jsonl", "--output", "o", "--seed", "1"],
    ],
)
def test_options_without_effect_are_refused(arguments, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
