"""The assessor learns from questions alone which of them are answered correctly."""

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score

from coca_mindspeed.baselines.predictors import Assessor, FitConfig, train_assessor
from coca_mindspeed.data.records import Record
from coca_mindspeed.errors import ConfigError
from experiments.miniature import digit_records
from tests.baselines.models_for_tests import random_policy, tiny_policy


def test_it_learns_a_planted_signal(tmp_path):
    policy = tiny_policy(tmp_path / "tiny")
    records = digit_records(1200, "train", 0)
    right = [record.question[0] == ">" for record in records]  # this target can sort and cannot count
    fit = FitConfig(lr=2e-3, weight_decay=0.0, batch=64, epochs=4, patience=2, validation=0.1)
    assessor, history = train_assessor(policy, records, right, fit, seed=0)
    unseen = digit_records(200, "evaluate", 1)
    confidence = np.array(assessor.confidence(unseen))
    assert roc_auc_score([r.question[0] == ">" for r in unseen], confidence) >= 0.95
    assert ((confidence >= 0) & (confidence <= 1)).all()
    assert history.losses[history.best_epoch] < history.losses[0]


def test_confidence_is_the_first_label_among_the_two(tmp_path):
    policy = random_policy(tmp_path / "model", "qwen2")
    assessor = Assessor(policy)
    record = Record("r", "d", "math", "What is 2 + 2?", "4", system="Be a pirate.")
    [prompt] = assessor.encode([record])
    text = policy.tokenizer.decode(prompt)
    assert "another language model" in text
    assert "pirate" not in text
    assert "boxed" not in text
    with torch.no_grad():
        probabilities = policy.model(torch.tensor([prompt])).logits[0, -1].softmax(-1)
    one, zero = (float(probabilities[policy.tokenizer(t, add_special_tokens=False)["input_ids"][0]]) for t in "10")
    assert assessor.confidence([record])[0] == pytest.approx(one / (one + zero), rel=1e-4)


def test_a_label_has_to_be_one_token(tmp_path):
    with pytest.raises(ConfigError, match="'12' should be one token"):
        Assessor(tiny_policy(tmp_path / "tiny"), ("12", "0"))
