"""Probe and assessor find a planted signal, nothing where there is nothing, and come back from disk the same."""

import re

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score

from coca_mindspeed.baselines.predictors import (
    Assessor,
    FitConfig,
    ProbeConfig,
    fit_with_early_stopping,
    load_probe,
    save_probe,
    train_assessor,
    train_probe,
)
from coca_mindspeed.data.records import Record
from coca_mindspeed.errors import ConfigError, DataError
from experiments.miniature import digit_records
from tests.baselines.models_for_tests import random_policy, tiny_policy

HIDDEN = 32


def planted(n, seed):
    """States of very different scales, and labels that a line through them decides, up to a little noise."""
    random = torch.Generator().manual_seed(seed)
    states = torch.randn(n, HIDDEN, generator=random)
    direction = torch.randn(HIDDEN, generator=torch.Generator().manual_seed(99))
    signal = states @ direction / direction.norm()
    labels = signal + 0.2 * torch.randn(n, generator=random) > 0
    scales = torch.logspace(-2, 2, HIDDEN)
    return states * scales + 5 * scales, labels


def auroc(probe, states, labels):
    return roc_auc_score(labels.numpy(), probe.confidence(states).numpy())


def test_it_finds_a_planted_linear_signal():
    probe, fit = train_probe(*planted(4000, 0), ProbeConfig(), seed=0)
    states, labels = planted(2000, 1)
    assert auroc(probe, states, labels) >= 0.95
    assert fit.losses[fit.best_epoch] == min(fit.losses) < fit.losses[0]


def test_it_finds_nothing_in_shuffled_labels():
    states, labels = planted(4000, 0)
    shuffled = labels[torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))]
    probe, _ = train_probe(states, shuffled, ProbeConfig(), seed=0)
    held_out, _ = planted(8000, 1)
    fresh = torch.rand(8000, generator=torch.Generator().manual_seed(10)) < 0.5
    assert 0.45 <= auroc(probe, held_out, fresh) <= 0.55
    # Nothing was learned means that it says the base rate, not that its confident guesses cancel.
    assert probe.confidence(held_out).std() < 0.1


def test_a_save_and_a_load_change_nothing(tmp_path):
    before = torch.get_rng_state()
    states, labels = planted(200, 0)
    probe, fit = train_probe(states, labels, ProbeConfig(layer=1, width=16, fit=FitConfig(epochs=3)), seed=0)
    assert torch.equal(before, torch.get_rng_state())  # the global random state is left alone
    save_probe(probe, fit, tmp_path / "probe")
    again = load_probe(tmp_path / "probe")
    assert torch.equal(again.confidence(states), probe.confidence(states))
    assert (again.layer, again.inner.out_features) == (1, 16)
    assert {p.name for p in (tmp_path / "probe").iterdir()} == {"probe.safetensors", "probe.json"}
    file = tmp_path / "probe" / "probe.safetensors"
    file.write_bytes(file.read_bytes()[:100])
    for damaged in (tmp_path / "probe", tmp_path):
        with pytest.raises(DataError, match=re.escape(str(damaged))):
            load_probe(damaged)


def test_the_weights_of_the_best_epoch_are_the_ones_that_stay():
    # One weight that grows with every step: better at first, then far too large for labels that are noisy.
    class Slope(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(()))

    random = torch.Generator().manual_seed(0)
    x = torch.randn(400, generator=random)
    labels = torch.rand(400, generator=random) < (2 * x).sigmoid()
    model = Slope()
    fit = fit_with_early_stopping(
        model, lambda rows: model.weight * x[rows], labels, FitConfig(lr=1.0, batch=20, epochs=30, patience=5), seed=0
    )
    assert len(fit.losses) - 1 == fit.best_epoch + 5 < 30
    assert fit.losses[fit.best_epoch] == min(fit.losses)
    held_out = torch.randperm(400, generator=torch.Generator().manual_seed(0))[:80]
    loss = torch.nn.functional.binary_cross_entropy_with_logits(
        model.weight.detach() * x[held_out], labels[held_out].float()
    )
    assert float(loss) == pytest.approx(min(fit.losses), abs=1e-6)


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
    with pytest.raises(ConfigError, match="'12'"):
        Assessor(tiny_policy(tmp_path / "tiny"), ("12", "0"))
