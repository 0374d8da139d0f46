"""``coca-mindspeed check`` of a run for a cluster: plan, verdict, ``--write``.  Local runs: tests/local/starts.tsv."""

import pytest
import yaml

from coca_mindspeed.cli import main

CHECK = ("check", "qwen25_3b_910b", "--quiet", "--output", "/nowhere/run", "--write")


def test_it_says_what_it_wrote(tmp_path, capsys):
    file = tmp_path / "[run].yaml"
    assert main([*CHECK, str(file)]) == 0
    assert capsys.readouterr().out == f"written: {file}\n"
    assert "actor_config" in yaml.safe_load(file.read_text())


@pytest.mark.parametrize(
    ("arguments", "code", "verdict"),
    [
        (["qwen25_7b_910b", "rollout.prompts=127", "optimizer.eps=0.1"], 1, "2 problems"),
        # no whole copy of the model fits the NPUs: a plan without its numbers, and the problem
        (["qwen25_7b_910b", "mindspeed_rl.actor_config.tensor_model_parallel_size=16"], 1, "1 problem"),
        (["qwen25_7b_910b", "mindspeed_rl.actor_config.tensor_model_parallel_size=0"], 1, "1 problem"),
        (["coca_qwen25_7b", "--output", "x"], 2, "1 problem"),
    ],
)
def test_the_last_line_is_the_verdict(arguments, code, verdict, capsys):
    assert main(["check", *arguments]) == code
    captured = capsys.readouterr()
    assert (captured.err if code else captured.out).splitlines()[-1] == verdict


@pytest.mark.parametrize(
    ("typed", "command"),
    [
        (["qwen25_7b_910b"], "bash launch/qwen25_7b_910b.sh"),
        (["qwen25_7b_910b", "hardware.nodes=2", "seed=1"], "NNODES=2 NODE_RANK=0 MASTER_ADDR=ADDRESS bash launch/"),
        (["demo", "data.train_size=70", "data.evaluate_size=35", "--output", "a b"], "coca-mindspeed train demo"),
    ],
)
def test_the_command_that_starts_the_run_takes_what_was_typed(typed, command, capsys):
    assert main(["check", *typed]) == 0
    start = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("start it by: "))
    assert start.startswith(f"start it by: {command}")
    assert "hardware.nodes" not in start
    assert ("--output 'a b'" in start) == ("a b" in typed)


def test_what_is_not_there_yet_is_named_before_the_verdict(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["check", "qwen25_7b_910b"]) == 0
    assert capsys.readouterr().out.splitlines()[-3].endswith("data.train, data.evaluate, model.path, weights")


@pytest.mark.parametrize(("file", "rows"), [("data/big_math/train.jsonl", "251,122"), ("mine.jsonl", "unknown")])
def test_a_missing_training_file(file, rows, tmp_path, monkeypatch, capsys):
    """It is a warning, also with --quiet; the published number of questions is not taken for another file's."""
    monkeypatch.chdir(tmp_path)
    assert main(["check", "qwen25_7b_910b", f"data.train={file}"]) == 0
    shown = capsys.readouterr()
    assert rows in next(line for line in shown.out.splitlines() if "iterations " in line and "updates" not in line)
    assert main(["check", "qwen25_7b_910b", f"data.train={file}", "--quiet"]) == 0
    assert shown.err == capsys.readouterr().err
    assert f"data.train='{file}'" in shown.err


@pytest.mark.parametrize(
    ("overrides", "row", "shown"),
    [
        ("qwen25_7b_910b", "time", "110 tokens/s"),
        ("qwen25_1p5b_910b", "time", "unknown"),
        ("llama3_8b_910c", "time", "unknown"),
        ("qwen25_7b_910b data.epochs=null trainer.steps=6", "checkpoints", "at most 107 GB"),
        ("qwen25_7b_910b data.epochs=null trainer.steps=100", "checkpoints", "at most 213 GB"),
        ("qwen25_7b_910b data.epochs=null trainer.steps=1000", "checkpoints", "at most 320 GB"),
        ("qwen25_7b_910b data.epochs=null trainer.steps=1000 method=sequential", "checkpoints", "at most 533 GB"),
        ("qwen25_7b_910b data.evaluate=null", "validation", "none"),
        ("qwen25_7b_910b data.evaluate=e.jsonl", "validation", "every 50 iterations"),
    ],
)
def test_rows_of_a_plan(overrides, row, shown, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")  # a row in one line
    assert main(["check", *overrides.split()]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.strip(" │|").startswith(f"{row} "))
    assert shown in line


@pytest.mark.parametrize("eager", ["true", "false"])
def test_a_note_on_graph_mode(eager, capsys):
    assert main(["check", "qwen25_7b_910b", f"mindspeed_rl.generate_config.enforce_eager={eager}"]) == 0
    assert ("TASK_QUEUE_ENABLE=1" in capsys.readouterr().out) == (eager == "false")


@pytest.mark.parametrize(
    ("steps", "time"),
    [(1000, "10.1 days"), (50, "12 hours"), (1, "0.24 hours")],  # 873 s each
)
def test_times_below_a_day_are_in_hours(steps, time, capsys):
    run = ["check", "qwen25_7b_910c", "data.epochs=null", f"trainer.steps={steps}"]
    assert main(run) == 0
    assert f" {time};" in capsys.readouterr().out


def test_it_makes_no_directory(tmp_path, capsys):
    for place in (tmp_path / "typo" / "x.yaml", tmp_path):
        assert main([*CHECK, str(place)]) == 1
        assert f"--write {place}" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
