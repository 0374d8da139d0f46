"""Intervals worked by hand, at their extremes, and against brute force; the ECE of a calibrated model."""

import itertools

import numpy as np
import pytest
from scipy.stats import beta, binomtest, norm
from scipy.stats import t as student_t
from sklearn.metrics import roc_auc_score

from coca_mindspeed.evaluation.intervals import (
    MEANS,
    Bins,
    Estimates,
    Mean,
    average_interval,
    ece_bounds,
    independent_units,
    paired_intervals,
)
from coca_mindspeed.evaluation.metrics import binomial_low, calibration_metrics, clopper_pearson
from coca_mindspeed.evaluation.predictions import GradedPredictions


def data(confidence, correct):
    confidence = np.asarray(confidence, dtype=float)
    return GradedPredictions(confidence, np.asarray(correct, dtype=bool), np.full(len(confidence), np.nan))


def drawn(n, seed=0):
    rng = np.random.default_rng(seed)
    confidence = np.round(rng.random(n), 2)
    return data(confidence, rng.random(n) < confidence)


@pytest.mark.parametrize("right", [0, 1, 12, 29, 30])
def test_accuracy_is_scipys_exact_binomial_interval(right):
    found = Estimates(data(np.full(30, 0.5), np.arange(30) < right)).interval("accuracy")
    expected = binomtest(right, 30).proportion_ci(0.95, "exact")
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high), abs=1e-12)


def test_the_interval_of_a_mean_by_hand():
    """Thirty answers of a mean of .9 that do not vary: two values are added at either end before the variance."""
    smooth = (30 * 0.9 + 2) / 34
    of_one = (0.9 - smooth) ** 2 + (2 * smooth**2 + 2 * (1 - smooth) ** 2) / 30
    size = 30 * smooth * (1 - smooth) / of_one * (norm.ppf(0.975) / student_t.ppf(0.975, 29)) ** 2
    assert size > 60  # more than the thirty answers, fewer than without any variance
    low = beta.ppf(0.025, size * 0.9, size * 0.1 + 1)
    high = beta.ppf(0.975, size * 0.9 + 1, size * 0.1)
    found = Mean(0.9, np.zeros(30), units=30.0).interval(0.0)
    assert (found.low, found.high) == pytest.approx((low, high), abs=1e-9)


def test_an_average_is_as_sure_as_its_smallest_data_set():
    """All right in sets of 10 and 1,000: the exact bound of 2 x 10 right answers."""
    parts = [Estimates(data(np.full(n, 0.5), np.ones(n))) for n in (10, 1000)]
    assert average_interval(parts, "accuracy").low == pytest.approx(0.025 ** (1 / 20), abs=1e-9)
    assert average_interval(parts[::-1], "accuracy") == average_interval(parts, "accuracy")


def test_an_average_of_ece_is_bounded_by_all_its_bounds_at_once():
    parts = [Estimates(drawn(80, seed)) for seed in range(3)]
    found = average_interval(parts, "ece", 0.94)
    bounds = [part.interval("ece", 0.98) for part in parts]  # an error of .06 among three
    assert found.low == pytest.approx(np.mean([each.low for each in bounds]))
    assert found.high == pytest.approx(np.mean([each.high for each in bounds]))


def brute_bounds(bins, level):
    """All signs one by one."""
    n, tail, gaps = bins.n, (1 - level) / 2, bins.gaps
    h = student_t.ppf(1 - tail, n - 1) ** 2 / (n - 1)
    highest = 0.0
    for signs in itertools.product((-1, 1), repeat=len(gaps)):
        mean = float(np.dot(signs, gaps))
        share = sum(w if s > 0 else r for s, w, r in zip(signs, bins.count - bins.right, bins.right, strict=True)) / n
        exact = mean + float(clopper_pearson(share * n, n, level)[1]) - share
        highest = max(highest, exact, mean + np.sqrt(h * max(bins.brier - mean**2, 0)))
    lowest = 0.0
    patterns = {tuple(-1 if i < cut else 1 for i in range(len(gaps))) for cut in range(len(gaps))}
    patterns |= {tuple(-s for s in pattern) for pattern in patterns}
    for signs in patterns:
        mean, one = float(np.dot(signs, gaps)), tail / len(patterns)
        share = sum(w if s > 0 else r for s, w, r in zip(signs, bins.count - bins.right, bins.right, strict=True)) / n
        student = student_t.ppf(1 - one, n - 1) * np.sqrt(max(bins.brier - mean**2, 0) / (n - 1))
        lowest = max(lowest, mean - max(share - float(binomial_low(share * n, n, one)), student))
    return lowest, highest


@pytest.mark.parametrize("seed", range(12))
def test_ece_bounds_are_those_over_all_signs(seed):
    rng = np.random.default_rng(seed)
    count = rng.integers(2, 60, size=rng.integers(1, 8)).astype(float)
    right = np.floor(count * rng.random(len(count)))
    stated = count * rng.random(len(count))
    brier = max(0.3, float(np.abs((stated - right) / count.sum()).sum()) ** 2)
    bins = Bins(count, right, stated, brier, float(count.sum()))
    found_low, found_high = ece_bounds(bins)
    low, high = brute_bounds(bins, 0.95)
    assert found_low == pytest.approx(min(low, float(np.abs(bins.gaps).sum())), abs=1e-12)
    # The closed form of Student's bound may lie above the best of finitely many signs, never below it.
    assert min(high, 1.0) - 1e-12 <= found_high <= min(high, 1.0) + 0.05


def test_samples_that_agree_count_once():
    once = drawn(60)
    index = np.repeat(np.arange(60), 8)
    copied = GradedPredictions(once.confidence[index], once.correct[index], np.full(480, np.nan))
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
    right, wrong = np.array([1, 2 / 3]) - area, np.array([0.5, 1, 1]) - area
    moves = np.concatenate([right * 5 / 2, wrong * 5 / 3])
    assert estimates.means["auroc"].variance(estimates.question) == pytest.approx((moves**2).sum() / 25 * 5 / 4)


def test_metrics_without_an_interval():
    estimates = Estimates(drawn(50), replicates=20)
    without = {name for name in estimates.values if np.isnan(estimates.interval(name).low)} - {"tokens_to_confidence"}
    assert without == set(estimates.values) - {*MEANS, "ece"}
    paired = paired_intervals(estimates, estimates)
    for name in without:
        assert not np.isnan(estimates.interval(name).estimate)
        assert np.isnan(estimates.interval(name).low)
        assert np.isnan(paired[name].high)
        assert np.isnan(average_interval([estimates, estimates], name).high)


@pytest.mark.parametrize("n_valid", [0, 1, 40])
def test_the_mean_behind_an_interval_is_the_metric(n_valid):
    of = drawn(40)
    tokens = np.where(np.arange(40) < 7, np.nan, np.arange(40) % 5)
    of = GradedPredictions(np.where(np.arange(40) < n_valid, of.confidence, np.nan), of.correct, tokens)
    estimates = Estimates(of)
    assert {name: mean.value for name, mean in estimates.means.items()} == pytest.approx(
        {name: estimates.values[name] for name in MEANS}, abs=1e-9, nan_ok=True
    )


def test_pairing_removes_what_the_methods_share():
    rng = np.random.default_rng(0)
    easy = rng.random(500)
    correct = rng.random(500) < easy
    better = correct | (rng.random(500) < 0.05)
    first = Estimates(GradedPredictions(np.round(easy, 2), correct, np.full(500, 9.0)))
    second = Estimates(GradedPredictions(np.round(easy, 2), better, np.full(500, 10.0)))
    paired = paired_intervals(first, second)
    assert paired["accuracy"].estimate == pytest.approx(better.mean() - correct.mean())
    # Unpaired, the two spreads add up.
    alone = first.interval("accuracy")
    assert paired["accuracy"].high - paired["accuracy"].low < 0.6 * (alone.high - alone.low)
    assert paired["accuracy"].low > 0
    assert paired["tokens_to_confidence"].low == pytest.approx(1.0)
    same = paired_intervals(first, first)
    assert all(i.estimate == 0 and not i.low > 0 and not i.high < 0 for i in same.values())
    assert same["accuracy"].high < 4 / 500  # no question of 500 differs: at most about four in 500 do
    for wrong in (lambda: paired_intervals(first, Estimates(drawn(11))), lambda: Estimates(drawn(9), questions=easy)):
        with pytest.raises(ValueError, match="questions"):
            wrong()


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
    all_different = np.random.default_rng(1).random(200)
    alone = GradedPredictions(all_different, of.correct, of.tokens_to_confidence)
    assert Estimates(alone).calibrated.mean == pytest.approx(found.mean, abs=0.02)
    assert Estimates(data([np.nan], [True])).calibrated.as_dict() == {"mean": None, "p95": None}
