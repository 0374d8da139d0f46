"""``coca-mindspeed check --write`` writes where it was told and makes no directories."""

from pathlib import Path

import pytest
import yaml

from coca_mindspeed.cli import main

PATCHES = Path(__file__).parents[2] / "patches"

CHECK = ("check", "qwen25_3b_910b", "--quiet", "--output", "/nowhere/run", "--write")


def test_it_says_what_it_wrote(tmp_path, capsys):
    file = tmp_path / "[run].yaml"
    assert main([*CHECK, str(file)]) == 0
    assert capsys.readouterr().out == f"written: {file}\n"
    assert "actor_config" in yaml.safe_load(file.read_text())


@pytest.mark.parametrize(
    ("arguments", "code", "verdict"),
    [
        (["demo"], 0, "OK"),
        (["qwen25_7b_910b", "rollout.prompts=127", "optimizer.eps=0.1"], 1, "2 problems"),
        (["local", "model.path=/nowhere", "data.train=/x"], 1, "2 problems"),
        # no whole copy of the model fits the NPUs: a plan without its numbers, and the problem
        (["qwen25_7b_910b", "mindspeed_rl.actor_config.tensor_model_parallel_size=16"], 1, "1 problem"),
        (["qwen25_7b_910b", "mindspeed_rl.actor_config.tensor_model_parallel_size=0"], 1, "1 problem"),
        (["demo", "rollout.prompt=1"], 2, "1 problem"),
        (["demo", "--resume"], 2, "1 problem"),
        (["nowhere.yaml"], 2, "1 problem"),
    ],
)
def test_the_last_line_is_the_verdict(arguments, code, verdict, capsys):
    assert main(["check", *arguments]) == code
    captured = capsys.readouterr()
    assert (captured.err if code else captured.out).splitlines()[-1] == verdict


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


@pytest.mark.parametrize("eager", ["true", "false"])
def test_a_note_on_graph_mode(eager, capsys):
    assert main(["check", "qwen25_7b_910b", f"mindspeed_rl.generate_config.enforce_eager={eager}"]) == 0
    assert ("TASK_QUEUE_ENABLE=1" in capsys.readouterr().out) == (eager == "false")


BUDGET = ["check", "qwen25_7b_910c", "--quiet", "--budget"]


@pytest.mark.parametrize(
    ("days", "overrides", "found"),
    [
        ("25", [], []),
        ("25", ["hardware.nodes=2"], ["hardware.nodes=1"]),
        ("19", ["method=sequential"], ["hardware.nodes=4"]),  # two stages
        ("1.3", [], ["hardware.nodes=16", "mindspeed_rl.generate_config.infer_tensor_parallel_size=2"]),
    ],
)
def test_the_smallest_layout_for_a_budget(days, overrides, found, capsys):
    assert main([*BUDGET, days, *overrides]) == 0
    words = capsys.readouterr().out.partition("overrides:")[2].split()
    assert [word for word in words if "=" in word and "NNODES" not in word] == found
    nodes = [word.removeprefix("hardware.nodes=") for word in found if word.startswith("hardware.nodes=")]
    assert [word for word in words if "NNODES" in word] == [f"NNODES={count}" for count in nodes if count != "1"]
    assert main(["check", "qwen25_7b_910c", "--quiet", *overrides, *found]) == 0  # they can be pasted


@pytest.mark.parametrize(
    ("steps", "time"),
    [(1000, "10.1 days"), (50, "12 hours"), (1, "0.24 hours")],  # 873 s each
)
def test_times_below_a_day_are_in_hours(steps, time, capsys):
    run = ["check", "qwen25_7b_910c", "data.epochs=null", f"trainer.steps={steps}"]
    for arguments in (run, [*run, "--quiet", "--budget", "25"]):
        assert main(arguments) == 0
        assert f" {time};" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "code", "problem"),
    [
        ([*BUDGET, "0.1"], 1, "[budget]"),
        ([*BUDGET, "25", "data.rows=null"], 1, "[budget-iterations]"),
        ([*BUDGET, "25", "optimizer.eps=0.1"], 1, "[optimizer-eps]"),
        ([*BUDGET, "0"], 2, "--budget"),
        (["check", "demo", "--budget", "1"], 2, "--budget"),
        (["check", "qwen25_7b_910b", "hardware=host", "--budget", "1"], 2, "--budget"),
    ],
)
def test_no_layout_for_a_budget(arguments, code, problem, capsys):
    try:
        found = main(arguments)
    except SystemExit as ended:
        found = ended.code
    assert found == code
    assert problem in capsys.readouterr().err


def test_nodes_that_the_prompts_cannot_be_split_over(capsys):
    """Three nodes would do in 7 days; 128 prompts are split over four."""
    assert main([*BUDGET, "7"]) == 0
    shown = capsys.readouterr().out
    assert "rollout.prompts=128" in shown
    assert "144" in shown  # a multiple of three nodes' 48 rollout engines
    assert shown.partition("overrides:")[2].split()[0] == "hardware.nodes=4"


def test_it_makes_no_directory(tmp_path, capsys):
    for place in (tmp_path / "typo" / "x.yaml", tmp_path):
        assert main([*CHECK, str(place)]) == 1
        assert f"--write {place}" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_patches_verify(tmp_path, capsys, monkeypatch):
    (tmp_path / "mindspeed_rl").mkdir()
    hooked = len(yaml.safe_load((PATCHES / "mindspeed_rl_2.3.0.yaml").read_text())["hooks"])
    monkeypatch.chdir(tmp_path)
    for path in (str(tmp_path), "."):
        assert main(["patches", "verify", path]) == 1
        assert f"{hooked} of {hooked} differ" in capsys.readouterr().out
