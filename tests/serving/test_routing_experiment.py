"""The experiment with two tiny tiers, at a size that says nothing but that every part works and goes on."""

import json

import pytest

from benchmarks.routing_experiment import run_experiment
from coca_mindspeed.evaluation.predictions import read_predictions


@pytest.mark.slow
def test_the_parts_fit_together_and_are_not_done_twice(tmp_path):
    overrides = [
        *("warm_up.steps=3", "warm_up.batch=8", "trainer.steps=1", "rollout.prompts=4"),
        *("evaluation.interval=0", "logging.tensorboard=false"),
    ]
    sizes = {"questions": 3, "train": 50, "evaluate": 12}
    found = run_experiment(tmp_path, 1, overrides, **sizes)
    assert 0 <= found["served_accuracy"]["mean"] <= 1
    assert found["served_tokens_small"]["mean"] > 0
    assert found["accuracy_small"]["seeds"] == 1
    for part in ("small", "large", "answer_first"):
        rows = read_predictions(tmp_path / "seed0" / part / "predictions.jsonl")
        assert [p.dataset for p in rows].count("digits") == [p.dataset for p in rows].count("arithmetic") == 6
        assert all(p.tokens >= 1 for p in rows)
    hidden = [
        json.loads((tmp_path / "seed0" / p / "run" / "model" / "config.json").read_text())["hidden_size"]
        for p in ("small", "large")
    ]
    assert hidden == [48, 128]
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("predictions.jsonl")}
    assert run_experiment(tmp_path, 1, overrides, **sizes) == found
    assert before == {path: path.stat().st_mtime_ns for path in tmp_path.rglob("predictions.jsonl")}
