"""AUROC within families, by hand, and its bootstrap."""

import numpy as np
import pytest

from coca_mindspeed.evaluation.metrics import calibration_metrics
from coca_mindspeed.evaluation.predictions import Prediction
from experiments.reproduce.discrimination import _draws, auroc, statistics


def answers(dataset, *rows):
    """Questions with two answers each: (confidence, correct) pairs."""
    return [
        Prediction(f"{number}", dataset, "q", "r", confidence, correct, 1, sample=sample)
        for number, pair in enumerate(rows)
        for sample, (confidence, correct) in enumerate(pair)
    ]


def test_weighted_auroc_is_that_of_repeated_rows():
    random = np.random.default_rng(0)
    confidence, correct = random.integers(0, 6, 40) / 5, random.random(40) < 0.4
    weights = random.integers(0, 4, (5, 40)).astype(float)
    for row, found in zip(weights, auroc(confidence, correct, weights), strict=True):
        repeated = np.repeat(np.arange(40), row.astype(int))
        assert found == pytest.approx(calibration_metrics(confidence[repeated], correct[repeated]).values["auroc"])
    assert np.isnan(auroc(confidence, np.ones(40, dtype=bool), weights)).all()


def test_families_apart_have_no_discrimination_within():
    """Easy family at .9, hard family at .1, each constant within; the third has only right answers."""
    easy = answers("easy", *[((0.9, True), (0.9, True))] * 3, ((0.9, False), (0.9, False)))
    hard = answers("hard", *[((0.1, False), (0.1, False))] * 3, ((0.1, True), (0.1, True)))
    sure = answers("sure", ((0.2, True), (0.9, True)))
    rows = [*easy, *hard]
    found = statistics(rows, _draws(rows, 0))
    assert found["accuracy"][0] == 0.5
    assert found["AUROC"][0] == pytest.approx(0.75)
    assert found["within"][0] == 0.5
    assert np.isnan(found["within, expectation"][0])
    assert statistics([*rows, *sure], _draws([*rows, *sure], 0))["within"][0] == 0.5


def test_the_bootstrap_draws_questions_with_all_their_answers_within_families():
    rows = [*answers("a", *[((0.5, True), (0.4, False))] * 30), *answers("b", *[((0.5, True), (0.5, True))] * 10)]
    draws = _draws(rows, 200)
    assert all(weights[0] == 1 for weights in draws.values())
    for family, size in (("a", 30), ("b", 10)):
        total = sum(weights for (dataset, _), weights in draws.items() if dataset == family)
        assert (total == size).all()
    found = statistics(rows, draws)
    assert np.allclose(found["accuracy"], 0.625)  # every question of a family has the same answers
    assert np.allclose(found["within"], 1.0)
