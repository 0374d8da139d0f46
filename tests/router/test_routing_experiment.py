"""The serving experiments at a tiny size: every part runs, and finished parts are not repeated."""

import json

import pytest

from benchmarks.routing_experiment import run_experiment
from coca_mindspeed.evaluation.predictions import read_predictions

TINY = [
    *("warm_up.steps=3", "warm_up.batch=8", "trainer.steps=1", "rollout.prompts=4"),
    *("evaluation.interval=0", "logging.tensorboard=false"),
]


@pytest.mark.slow
def test_the_experiment_runs_and_resumes(tmp_path):
    sizes = {"questions": 3, "train": 50, "evaluate": 12}
    found = run_experiment(tmp_path, 1, TINY, **sizes)
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
    assert run_experiment(tmp_path, 1, TINY, **sizes) == found
    assert before == {path: path.stat().st_mtime_ns for path in tmp_path.rglob("predictions.jsonl")}
