"""Metrics: numbers worked by hand, other people's implementations, brute force, and properties."""

import itertools
import json
import math
from decimal import Decimal

import numpy as np
import pytest
from sklearn.metrics import brier_score_loss, log_loss, roc_auc_score

from coca_mindspeed.evaluation.metrics import (
    COVERAGES,
    HEADLINE,
    MetricOptions,
    bin_edges,
    bin_index,
    bin_table,
    calibration_metrics,
    places_of,
    risk_table,
    suggested_threshold,
)


def measure(pairs):
    return calibration_metrics(np.array([s / 10 for s, _ in pairs]), np.array([y for _, y in pairs]))


BY_HAND = {
    "accuracy": 3 / 5,
    "success_rate": 4 / 5,
    "tokens_to_confidence": 10.0,
    "auroc": (0.5 + 1 + 0 + 1) / 4,  # pairs (.9,.9) (.9,.2) (.6,.9) (.6,.2)
    "ece": (2 * 0.4 + 0.4 + 0.2) / 4,  # bins of .9, .6 and .2
    "mce": 0.4,
    "pce": 2 * 0.4 / 4 + 0.2 / 4,  # .9 against .5 and .2 against 0; the bin of .6 is under-confident
    "wrong_confidence": (0.9 + 0.2) / 2,
    "brier": (0.01 + 0.81 + 0.16 + 0.04) / 4,
    "reliability": (2 * 0.16 + 0.16 + 0.04) / 4,
    "resolution": (0 + 0.25 + 0.25) / 4,
    "uncertainty": 0.25,
    "log_score": -(math.log(0.9) + math.log(0.1) + math.log(0.6) + math.log(0.8)) / 4,
    # Of the two answers at .9 one is right, so the first place has risk 1/2, the first two 1/2, then 1/3, 2/4.
    "aurc": (1 / 2 + 1 / 2 + 1 / 3 + 2 / 4) / 4,
    "accuracy_at_0.25": 0.5,
    "accuracy_at_0.5": 0.5,
    "accuracy_at_0.75": 2 / 3,
}


def test_by_hand():
    confidence = np.array([0.9, 0.9, 0.6, 0.2, np.nan])
    correct = np.array([True, False, True, False, True])
    tokens = np.array([9.0, 11.0, 10.0, np.nan, np.nan])
    metrics = calibration_metrics(confidence, correct, tokens)
    assert (metrics.n, metrics.n_valid) == (5, 4)
    assert {name: metrics.values[name] for name in BY_HAND} == pytest.approx(BY_HAND)
    assert metrics.undefined == {}


def brute_ece(confidence, correct, bins):
    """Decimal bins by exact integer arithmetic on confidences in ten-thousandths."""
    places = np.array([max(0, -(-round(s * 10_000) * bins // 10_000) - 1) for s in confidence])
    return sum(
        abs(confidence[places == b].mean() - correct[places == b].mean()) * np.mean(places == b)
        for b in np.unique(places)
    )


def brute_aurc(confidence, correct):
    """Mean over the places of the risk, each group of ties replaced by its mean error."""
    order = np.argsort(-confidence, kind="stable")
    errors = 1.0 - correct[order]
    for value in np.unique(confidence):
        tied = confidence[order] == value
        errors[tied] = errors[tied].mean()
    return (np.cumsum(errors) / np.arange(1, len(errors) + 1)).mean()


@pytest.mark.parametrize("seed", range(20))
def test_equal_to_the_oracles(seed):
    rng = np.random.default_rng(seed)
    n = int(rng.integers(2, 400))
    confidence = np.round(rng.beta(*rng.uniform(0.3, 3, size=2), size=n), int(rng.integers(1, 5)))
    correct = rng.random(n) < confidence ** rng.uniform(0.3, 3)
    correct[:2] = [True, False]
    metrics = calibration_metrics(confidence, correct, options=MetricOptions(int(bins := rng.choice([5, 10, 20]))))
    assert metrics.values["auroc"] == pytest.approx(roc_auc_score(correct, confidence), abs=1e-9)
    assert metrics.values["brier"] == pytest.approx(brier_score_loss(correct, confidence), abs=1e-9)
    assert metrics.values["log_score"] == pytest.approx(log_loss(correct, confidence.clip(1e-6, 1 - 1e-6)), abs=1e-9)
    assert metrics.values["ece"] == pytest.approx(brute_ece(confidence, correct, int(bins)), abs=1e-9)
    assert metrics.values["aurc"] == pytest.approx(brute_aurc(confidence, correct), abs=1e-9)


def test_selective_accuracy_is_the_mean_over_orders_of_ties():
    pairs = [(9, True), (5, False), (5, True), (5, True), (1, False)]
    orders = [sorted(order, key=lambda pair: -pair[0]) for order in itertools.permutations(pairs)]
    values = measure(pairs).values
    for name, coverage in COVERAGES.items():
        places = math.ceil(coverage * len(pairs))
        assert values[name] == pytest.approx(np.mean([[y for _, y in order[:places]] for order in orders]))


def test_a_coverage_that_is_a_whole_number_of_answers_is_not_rounded_up():
    # In floats 0.29 * 100 is 28.999999999999996 and 0.07 * 100 is 7.000000000000001.
    assert (places_of(0.29, 100), places_of(0.07, 100), places_of(0.5, 5)) == (29, 7, 3)


@pytest.mark.parametrize(
    ("confidence", "correct", "name", "reason"),
    [
        ([0.2, 0.7], [True, True], "auroc", "are correct"),
        ([0.2, np.nan], [False, True], "auroc", "are wrong"),
        ([np.nan, np.nan], [False, True], "ece", "no response has a valid confidence"),
        ([], [], "accuracy", "there are no predictions"),
        ([0.5], [True], "tokens_to_confidence", "tokens_to_confidence"),
    ],
)
def test_undefined_is_nan_with_a_reason_and_null_in_json(confidence, correct, name, reason):
    metrics = calibration_metrics(np.array(confidence, dtype=float), np.array(correct, dtype=bool))
    assert math.isnan(metrics.values[name])
    assert reason in metrics.undefined[name]
    assert set(metrics.undefined) == {n for n, value in metrics.values.items() if math.isnan(value)}
    row = json.loads(json.dumps(metrics.as_dict(), allow_nan=False))
    assert row[name] is None
    assert tuple(metrics.headline()) == HEADLINE


HALVES, BOTH = np.array([0.5, 0.5]), np.array([True, False])


@pytest.mark.parametrize(
    ("confidence", "correct", "tokens", "bins", "error", "named"),
    [
        (HALVES, np.array([True]), None, 10, ValueError, "length"),
        (HALVES, np.array([1, 0]), None, 10, TypeError, "int64"),
        (HALVES, BOTH, np.array([1.0]), 10, ValueError, "length"),
        (HALVES, BOTH, None, 0, ValueError, "bins"),
        (np.array([0.5, 1.01]), BOTH, None, 10, ValueError, r"\[0, 1\]"),
        (np.array([-0.1, 0.5]), BOTH, None, 10, ValueError, r"\[0, 1\]"),
        (np.array([0, 1]), BOTH, None, 10, TypeError, "int64"),
        (np.array([[0.5]]), np.array([[True]]), np.array([[1.0]]), 10, ValueError, r"\[1, 1\]"),
    ],
)
def test_bad_arguments_are_refused(confidence, correct, tokens, bins, error, named):
    with pytest.raises(error, match=named):
        calibration_metrics(confidence, correct, tokens, MetricOptions(bins))


@pytest.mark.parametrize(
    ("stated", "right", "expected"),
    [
        ([0.9, 0.8, 0.8, 0.3, math.nan], [1, 1, 0, 0, 1], (0.9, 0.2, 0.0)),  # 0.8 is no better, and so 0.9
        ([0.9, 0.8, 0.6, 0.3], [0, 1, 1, 0], (0.6, 0.75, 1 / 3)),
        ([0.9, 0.3], [0, 1], None),
        ([math.nan], [1], None),
    ],
)
def test_the_suggested_threshold(stated, right, expected):
    found = suggested_threshold(np.array(stated), np.array(right, dtype=bool))
    shown = found and (found.threshold, found.coverage, found.risk)
    assert shown == (None if expected is None else pytest.approx(expected))


def test_risk_table():
    s = np.array([1.0, 0.9, 0.9, 0.5, math.nan])
    y = np.array([True, True, False, False, True])
    rows = {row.threshold: row for row in risk_table(s, y, (1.0, 0.9, 0.5, 0.0))}
    assert [(r.accepted, r.coverage, r.risk) for r in rows.values()] == [
        (1, 0.2, 0.0), (3, 0.6, pytest.approx(1 / 3)), (4, 0.8, 0.5), (4, 0.8, 0.5)]  # fmt: skip
    # The exact interval's ends: the errors at which so many or more (or fewer) have a chance of 2.5%.
    row = rows[0.9]
    assert 1 - (1 - row.low) ** 3 == pytest.approx(0.025)
    assert (1 - row.high) ** 3 + 3 * row.high * (1 - row.high) ** 2 == pytest.approx(0.025)
    assert math.isnan(risk_table(s[3:], y[3:], (0.9,))[0].risk)


def exact_bin(text, bins, closed):
    """The bin by decimal arithmetic; the first (closed on the right) or last (on the left) holds both of its edges."""
    place = Decimal(text) * bins
    return max(0, math.ceil(place) - 1) if closed == "right" else min(bins - 1, math.floor(place))


@pytest.mark.parametrize("closed", ["right", "left"])
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize(("bins", "decimals"), [(10, 1), (10, 2), (10, 4), (20, 2), (100, 2), (15, 3), (7, 3)])
def test_every_decimal_lies_in_its_exact_bin(bins, decimals, dtype, closed):
    texts = [f"{k / 10**decimals:.{decimals}f}" for k in range(10**decimals + 1)]
    confidence = np.array([dtype(text) for text in texts])
    index = bin_index(confidence, bin_edges(confidence.dtype, bins), closed)
    assert index.tolist() == [exact_bin(text, bins, closed) for text in texts]


def test_table_by_hand():
    confidence = np.array([0.0, 0.1, 0.95, 1.0, 1.0, np.nan])
    correct = np.array([False, True, True, True, False, True])
    table = bin_table(confidence, correct)
    assert table.count.tolist() == [2, 0, 0, 0, 0, 0, 0, 0, 0, 3]
    assert table.confidence[[0, 9]] == pytest.approx([0.05, 2.95 / 3])
    assert table.accuracy[[0, 9]] == pytest.approx([0.5, 2 / 3])
    assert np.isnan(table.accuracy[1:9]).all()
    assert np.isnan(table.low[1:9]).all()
