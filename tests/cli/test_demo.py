"""The demo as the user runs it: its files and its promises."""

import json
import math
import shlex
import shutil

import pytest

from coca_mindspeed.cli import main
from coca_mindspeed.evaluation.metrics import calibration_metrics, show
from coca_mindspeed.evaluation.predictions import outcomes, read_predictions
from tests.local.runs_for_tests import SMALL, rows

METRICS = {"accuracy", "auroc", "ece", "brier", "success_rate", "tokens_to_confidence", "n", "ungradable"}
PREDICTION = ["id", "dataset", "question", "response", "confidence", "correct", "tokens_to_confidence"]
PREDICTION += ["category", "seed", "form"]
SHORTER = (
    "warm_up.steps=150",
    "warm_up.batch=64",
    "trainer.steps=20",
    "evaluation.interval=0",
    "evaluation.final_questions=200",
)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_demo_keeps_its_promises(tmp_path, capsys, no_pictures):
    """A seed that nobody chose for it, in a few steps: over-confident before, calibrated after."""
    output = tmp_path / "demo"
    assert main(["demo", "--seed", "20261120", "--output", str(output), "--quiet", *SHORTER]) == 0
    summary = json.loads((output / "summary.json").read_text())
    assert list(summary) == ["seed", "method", "before", "after", "questions", "seconds"]
    assert (summary["seed"], summary["method"]) == (20261120, "coca")
    assert sorted(summary["seconds"]) == ["evaluate", "total", "train", "warm_up"]
    before, after = summary["before"], summary["after"]
    assert before.keys() == after.keys() >= METRICS
    assert after["n"] == 200
    assert after["ece"] <= min(before["ece"] / 3, 0.2)
    assert after["brier"] <= before["brier"] / 2
    assert after["accuracy"] >= before["accuracy"] - 0.05
    assert after["success_rate"] >= 0.98
    for name, scores in (("before", before), ("after", after)):
        lines = rows(output / f"predictions_{name}.jsonl")
        assert len(lines) == 200
        assert [key for key in lines[0] if key != "method"] == PREDICTION
        assert lines[0].get("method") == {"before": None, "after": "coca"}[name]
        data = outcomes(read_predictions(output / f"predictions_{name}.jsonl"))
        again = calibration_metrics(data.confidence, data.correct, data.tokens_to_confidence).headline()
        assert {**again, "ungradable": 0} == scores
    shown = capsys.readouterr().out
    assert f"{after['ece']:.3f}" in shown
    assert show("accuracy", before["accuracy"]) in shown


def small_demo(output, *more: str) -> int:
    return main(["demo", "--seed", "1", "--output", str(output), "--quiet", *more, *SMALL])


def test_a_finished_demo_is_evaluated_again(finished_demo, tmp_path, capsys, no_pictures):
    output = shutil.copytree(finished_demo, tmp_path / "demo")
    summary = json.loads((output / "summary.json").read_text())
    assert all(value is None or math.isfinite(value) for value in summary["after"].values())
    assert small_demo(output) == 1
    assert "already holds a run" in capsys.readouterr().err
    first = (output / "predictions_after.jsonl").read_bytes()
    assert small_demo(output, "--resume") == 0
    assert (output / "predictions_after.jsonl").read_bytes() == first


OF_ITS_OWN = ("trainer.steps=1", "warm_up.steps=2", "evaluation.questions=null", "rollout.max_prompt_tokens=256")


def test_a_demo_of_other_questions_shows_some_of_them(tmp_path, capsys, no_pictures):
    for name, sign, questions in (("train", "+", 8), ("held_out", "*", 3)):
        sums = [{"question": f"{i}{sign}2", "answer": str(i + 2)} for i in range(questions)]
        lines = [{**line, "metadata": {"instruction": ""}} for line in sums]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    data = ["data=records", f"data.train={tmp_path}/train.jsonl", f"data.evaluate={tmp_path}/held_out.jsonl"]
    output = tmp_path / "my demo"
    settings = [setting for setting in SMALL if not setting.startswith("data.")]
    assert main(["demo", "--output", str(output), "--quiet", *settings, *OF_ITS_OWN, *data]) == 0
    lines = capsys.readouterr().out.splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("Held-out questions"))
    assert [line.split()[1] for line in lines[at + 1 : at + 4]] == ["0*2", "1*2", "2*2"]
    assert shlex.split(lines[at + 4].partition(": ")[2])[:3] == ["coca-mindspeed", "ask", str(output)]
    assert main(["demo", "--output", str(tmp_path / "x"), *settings, *data[:2], "data.evaluate=null"]) == 1
    assert "data.evaluate=null" in capsys.readouterr().err


def test_again_removes_a_demo_of_the_same_settings_and_nothing_else(finished_demo, tmp_path, monkeypatch, no_pictures):
    run = shutil.copytree(finished_demo, tmp_path / "demo")
    (run / "mine.txt").write_text("kept")
    assert small_demo(run, "--again", "method=rlvr") == 1
    other = tmp_path / "other"
    other.mkdir()
    (other / "mine.txt").write_text("kept")
    assert small_demo(other, "--again") == 1
    assert [(place / "mine.txt").read_text() for place in (run, other)] == ["kept", "kept"]
    monkeypatch.setattr("coca_mindspeed.cli.demo.open_run", None)
    with pytest.raises(TypeError):
        small_demo(run, "--again")
    assert not run.exists()
