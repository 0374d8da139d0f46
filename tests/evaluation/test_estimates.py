"""Intervals worked by hand, at their extremes, and against brute force; the ECE of a calibrated model."""

import itertools

import numpy as np
import pytest
from scipy.stats import binomtest
from scipy.stats import t as student_t
from sklearn.metrics import roc_auc_score

from coca_mindspeed.evaluation.intervals.bounds import share_high, share_low
from coca_mindspeed.evaluation.intervals.ece import Bins, ece_interval
from coca_mindspeed.evaluation.intervals.estimates import (
    Estimates,
    average_interval,
    has_interval,
    independent_units,
    paired_intervals,
)
from coca_mindspeed.evaluation.metrics.calibration import calibration_metrics
from coca_mindspeed.evaluation.metrics.weighted import MetricOptions
from coca_mindspeed.evaluation.predictions import Outcomes


def data(confidence, correct):
    confidence = np.asarray(confidence, dtype=float)
    return Outcomes(confidence, np.asarray(correct, dtype=bool), np.full(len(confidence), np.nan))


def drawn(n, seed=0):
    rng = np.random.default_rng(seed)
    confidence = np.round(rng.random(n), 2)
    return data(confidence, rng.random(n) < confidence)


@pytest.mark.parametrize("right", [0, 1, 12, 29, 30])
def test_accuracy_is_scipys_exact_binomial_interval(right):
    found = Estimates(data(np.full(30, 0.5), np.arange(30) < right)).interval("accuracy")
    expected = binomtest(right, 30).proportion_ci(0.95, "exact")
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high), abs=1e-12)


def test_nothing_seen_is_not_nothing_possible():
    sure = Estimates(data(np.ones(30), np.ones(30)))
    for name in ("accuracy", "success_rate", "brier", "ece"):
        interval = sure.interval(name)
        assert 0.05 < interval.high - interval.low < 0.15, name
    perfect = Estimates(data([0.9] * 15 + [0.1] * 15, [True] * 15 + [False] * 15)).interval("auroc")
    assert (perfect.estimate, perfect.high) == (1.0, 1.0)
    assert 0.7 < perfect.low < 0.9


def brute_bounds(bins, level):
    """All signs one by one."""
    n, tail, gaps = bins.n, (1 - level) / 2, bins.gaps
    h = student_t.ppf(1 - tail, n - 1) ** 2 / (n - 1)
    highest = 0.0
    for signs in itertools.product((-1, 1), repeat=len(gaps)):
        mean = float(np.dot(signs, gaps))
        share = sum(w if s > 0 else r for s, w, r in zip(signs, bins.count - bins.right, bins.right, strict=True)) / n
        exact = mean + float(share_high(share, n, tail)) - share
        highest = max(highest, exact, mean + np.sqrt(h * max(bins.brier - mean**2, 0)))
    lowest = 0.0
    patterns = {tuple(-1 if i < cut else 1 for i in range(len(gaps))) for cut in range(len(gaps))}
    patterns |= {tuple(-s for s in pattern) for pattern in patterns}
    for signs in patterns:
        mean, one = float(np.dot(signs, gaps)), tail / len(patterns)
        share = sum(w if s > 0 else r for s, w, r in zip(signs, bins.count - bins.right, bins.right, strict=True)) / n
        student = student_t.ppf(1 - one, n - 1) * np.sqrt(max(bins.brier - mean**2, 0) / (n - 1))
        lowest = max(lowest, mean - max(share - float(share_low(share, n, one)), student))
    return lowest, highest


@pytest.mark.parametrize("seed", range(40))
def test_ece_bounds_are_those_over_all_signs(seed):
    rng = np.random.default_rng(seed)
    count = rng.integers(2, 60, size=rng.integers(1, 8)).astype(float)
    right = np.floor(count * rng.random(len(count)))
    stated = count * rng.random(len(count))
    brier = max(0.3, float(np.abs((stated - right) / count.sum()).sum()) ** 2)
    bins = Bins(count, right, stated, brier, float(count.sum()))
    found = ece_interval(bins)
    low, high = brute_bounds(bins, 0.95)
    assert found.low == pytest.approx(min(low, found.estimate), abs=1e-12)
    # The closed form of Student's bound may lie above the best of finitely many signs, never below it.
    assert min(high, 1.0) - 1e-12 <= found.high <= min(high, 1.0) + 0.05


def test_an_interval_contains_its_estimate_and_narrows_with_the_level():
    for options in (MetricOptions(), MetricOptions(debias=True), MetricOptions(bins=4, scheme="equal_mass")):
        estimates = Estimates(drawn(80), options=options)
        wide, narrow = estimates.interval("ece", 0.99), estimates.interval("ece", 0.8)
        assert 0 <= wide.low <= narrow.low <= narrow.estimate <= narrow.high <= wide.high <= 1


def test_samples_that_agree_count_once():
    once = drawn(60)
    index = np.repeat(np.arange(60), 8)
    copied = Outcomes(once.confidence[index], once.correct[index], np.full(480, np.nan))
    together, alone = Estimates(copied, questions=index), Estimates(once)
    assert independent_units(index) == pytest.approx(60)
    for name in ("accuracy", "brier", "auroc", "ece"):
        first, second = together.interval(name), alone.interval(name)
        assert first.estimate == pytest.approx(second.estimate)
        assert (first.high - first.low) == pytest.approx(second.high - second.low, rel=0.12), name
        apart = Estimates(copied).interval(name)
        assert apart.high - apart.low < 0.6 * (first.high - first.low)


def test_variance_of_auroc_is_delongs():
    # Two right answers above two of three wrong ones: placements by hand.
    of = data([0.9, 0.6, 0.7, 0.2, 0.1], [True, True, False, False, False])
    estimates = Estimates(of)
    area = roc_auc_score(of.correct, of.confidence)
    assert estimates.influences["auroc"].value == pytest.approx(area)
    right, wrong = np.array([1, 2 / 3]) - area, np.array([0.5, 1, 1]) - area
    moves = np.concatenate([right * 5 / 2, wrong * 5 / 3])
    assert estimates.bounded("auroc").variance == pytest.approx((moves**2).sum() / 25 * 5 / 4)


def test_what_has_no_interval_has_none():
    estimates = Estimates(drawn(50), replicates=20)
    without = {name for name in estimates.values if not has_interval(name)}
    without_bins = {"smooth_ece", "ks", "excess_aurc"}
    assert without == {"mce", "reliability", "resolution", "uncertainty", "log_score"} | without_bins
    paired = paired_intervals(estimates, estimates)
    for name in without:
        assert np.isnan(estimates.interval(name).low)
        assert not np.isnan(estimates.interval(name).estimate)
        assert np.isnan(paired[name].high)
        assert np.isnan(average_interval([estimates, estimates], name).high)


def test_a_difference_of_ece_is_as_wide_as_both():
    first, second = Estimates(drawn(100)), Estimates(data(np.full(100, 0.9), np.arange(100) < 50))
    found = paired_intervals(first, second)["ece"]
    one, other = (e.interval("ece", 0.975) for e in (first, second))
    assert (found.low, found.high) == pytest.approx((other.low - one.high, other.high - one.low))
    assert found.low > 0


def test_a_calibrated_models_ece_is_that_of_redrawn_answers():
    of = drawn(200)
    found = Estimates(of, replicates=2000).calibrated
    rng = np.random.default_rng(5)
    redrawn = [calibration_metrics(of.confidence, rng.random(200) < of.confidence).values["ece"] for _ in range(1000)]
    assert found.mean == pytest.approx(np.mean(redrawn), abs=0.002)
    assert found.high == pytest.approx(np.quantile(redrawn, 0.95), abs=0.005)
    alone = Outcomes(np.random.default_rng(1).random(200), of.correct, of.tokens_to_confidence)  # all different
    assert Estimates(alone).calibrated.mean == pytest.approx(found.mean, abs=0.02)
    assert Estimates(data([np.nan], [True])).calibrated.as_dict() == {"mean": None, "p95": None}
