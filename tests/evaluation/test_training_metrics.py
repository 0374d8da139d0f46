"""Both engines' metrics under one set of names."""

import json

import pytest

from coca_mindspeed.errors import DataError
from coca_mindspeed.evaluation.training_metrics import common_names, read_training


def test_names_of_the_port():
    row = {
        "iteration": 3,
        "coca/confidence_reward": -0.2,
        "coca/answer_reward": 0.5,
        "coca/batch_ece": 0.1,
        "coca/confidence_length": 10.0,
        "coca/answer_length": 90.0,
        "validation/ece": 0.2,
        "actor/pg_loss": 1.0,
    }
    named = common_names(row)
    assert named["step"] == 3
    assert (named["reward/confidence"], named["reward/answer"], named["rollout/ece"]) == (-0.2, 0.5, 0.1)
    assert named["response/length"] == 100
    assert named["eval/ece"] == 0.2
    assert named["actor/pg_loss"] == 1.0


def test_our_own_names_stay():
    row = {"step": 3, "reward/answer": 0.5, "response/length": 12.0}
    assert common_names(row) == row
    assert common_names({"reward/answer": 0.5, "coca/answer_reward": 0.1})["reward/answer"] == 0.5


def test_rows_need_a_step(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(json.dumps({"iteration": 1}) + "\n" + json.dumps({"loss": 1}))
    with pytest.raises(DataError, match=r"metrics\.jsonl:2: expected a whole-number 'step', found None"):
        read_training(path)
