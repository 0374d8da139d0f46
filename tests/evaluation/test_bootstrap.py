"""Bootstrap: equal to resampling by copying rows, seeded, paired, by question, covering, and fast."""

import time

import numpy as np
import pytest
from sklearn.metrics import brier_score_loss, roc_auc_score

from coca_mindspeed.evaluation.intervals.bounds import shifted_percentiles
from coca_mindspeed.evaluation.intervals.estimates import Estimates, paired_intervals, question_index, resample
from coca_mindspeed.evaluation.metrics.calibration import calibration_metrics
from coca_mindspeed.evaluation.metrics.weighted import MetricOptions, WeightedSample
from coca_mindspeed.evaluation.predictions import Outcomes
from tests.processor import allowed


def draw(n, seed=0, decimals=2, invalid=0.0):
    rng = np.random.default_rng(seed)
    confidence = np.round(rng.random(n), decimals)
    correct = rng.random(n) < confidence
    confidence[rng.random(n) < invalid] = np.nan
    return Outcomes(confidence, correct, rng.integers(8, 12, n).astype(float))


def bootstrap(data, *, questions=None, replicates=1000, seed=0):
    sample = WeightedSample(data.confidence, data.correct, data.tokens_to_confidence, MetricOptions())
    return resample([sample], question_index(questions, len(data)), replicates, seed)[0]


@pytest.mark.parametrize("options", [MetricOptions(), MetricOptions(debias=True, bins=7)])
@pytest.mark.parametrize("decimals", [1, 6])
def test_a_weighting_is_the_same_as_copied_rows(decimals, options):
    data = draw(80, decimals=decimals, invalid=0.1)
    rng = np.random.default_rng(1)
    rows = rng.integers(0, 80, size=(20, 80))
    weights = np.stack([np.bincount(row, minlength=80) for row in rows]).astype(float)
    sample = WeightedSample(data.confidence, data.correct, data.tokens_to_confidence, options)
    values = sample.metrics(weights[:, sample.order])
    for i, row in enumerate(rows):
        arrays = (each[row] for each in (data.confidence, data.correct, data.tokens_to_confidence))
        copied = calibration_metrics(*arrays, options)
        expected = {name: value for name, value in copied.values.items() if name != "smooth_ece"}  # never redrawn
        assert {name: value[i] for name, value in values.items()} == pytest.approx(expected, abs=1e-9)
        valid = ~np.isnan(data.confidence[row])
        pair = data.correct[row][valid], data.confidence[row][valid]
        assert values["auroc"][i] == pytest.approx(roc_auc_score(*pair), abs=1e-9)
        assert values["brier"][i] == pytest.approx(brier_score_loss(*pair), abs=1e-9)


def test_each_question_is_drawn_once_on_average_and_as_often_as_a_binomial_says():
    # Question i alone is correct, so a replicate's accuracy is the number of its draws / 50.
    data = Outcomes(np.full(50, 0.5), np.arange(50) == 7, np.full(50, 9.0))
    draws = bootstrap(data, replicates=3000)["accuracy"] * 50  # in several blocks
    assert draws.shape == (3000,)
    assert draws == pytest.approx(np.round(draws))
    assert draws.mean() == pytest.approx(1.0, abs=0.06)
    assert draws.var() == pytest.approx(0.98, abs=0.1)  # Binomial(50, 1/50)


def test_undefined_stays_undefined():
    data = Outcomes(np.array([0.5, 0.6]), np.array([True, True]), np.full(2, np.nan))
    interval = Estimates(data, replicates=20).interval("auroc")
    assert np.isnan([interval.estimate, interval.low, interval.high]).all()
    assert interval.as_dict() == {"estimate": None, "low": None, "high": None}
    empty = Outcomes(np.array([]), np.array([], dtype=bool), np.array([]))
    assert np.isnan(bootstrap(empty, replicates=5)["accuracy"]).all()
    assert np.isnan(Estimates(empty, replicates=5).interval("accuracy").high)
    assert np.isnan(Estimates(empty, replicates=5).interval("ece").high)


def test_samples_of_a_question_are_drawn_together():
    # Ten questions with 20 equal samples each: the error is that of ten, not of two hundred.
    correct = np.repeat(np.arange(10) < 5, 20)
    data = Outcomes(np.full(200, 0.5), correct, np.full(200, 9.0))
    questions = np.repeat(np.arange(10), 20)
    together = bootstrap(data, questions=questions, replicates=4000)["accuracy"].std()
    apart = bootstrap(data, replicates=4000)["accuracy"].std()
    assert together == pytest.approx(np.sqrt(0.25 / 10), rel=0.05)
    assert apart == pytest.approx(np.sqrt(0.25 / 200), rel=0.05)


def test_unequal_numbers_of_samples_can_make_a_replicate_larger_than_the_data():
    questions = np.array([0] * 9 + [1])
    values = bootstrap(draw(10), questions=questions, replicates=50)
    assert np.isfinite(values["aurc"]).all()


def test_pairing_removes_what_the_methods_share():
    rng = np.random.default_rng(0)
    easy = rng.random(500)
    correct = rng.random(500) < easy
    first = Outcomes(np.round(easy, 2), correct, np.full(500, 9.0))
    better = correct | (rng.random(500) < 0.05)
    second = Outcomes(np.round(easy, 2), better, np.full(500, 10.0))
    paired = paired_intervals(Estimates(first), Estimates(second))
    assert paired["accuracy"].estimate == pytest.approx(better.mean() - correct.mean())
    # Unpaired, the two spreads add up.
    width = paired["accuracy"].high - paired["accuracy"].low
    alone = Estimates(first).interval("accuracy")
    assert width < 0.6 * (alone.high - alone.low)
    assert paired["accuracy"].low > 0
    assert paired["tokens_to_confidence"].low == pytest.approx(1.0)
    same = paired_intervals(Estimates(first), Estimates(first))
    assert all(i.estimate == 0 and not i.low > 0 and not i.high < 0 for i in same.values())
    assert same["accuracy"].high < 4 / 500  # no question of 500 differs: at most about four in 500 do


def test_paired_draws_follow_each_methods_own_order():
    # The same predictions, one method's confidence reversed: accuracies agree on every replicate.
    data = draw(60)
    reversed_ = Outcomes(1 - data.confidence, data.correct, data.tokens_to_confidence)
    interval = paired_intervals(Estimates(data, replicates=100), Estimates(reversed_, replicates=100))["accuracy"]
    assert interval.estimate == 0
    assert -0.1 < interval.low < 0 < interval.high < 0.1
    tokens = [Outcomes(d.confidence, d.correct, np.arange(60.0)) for d in (data, reversed_)]
    drawn = paired_intervals(*(Estimates(d, replicates=100) for d in tokens))["tokens_to_confidence"]
    assert (drawn.low, drawn.high) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: paired_intervals(Estimates(draw(10)), Estimates(draw(11))), "10 and 11"),
        (lambda: paired_intervals(Estimates(draw(10)), Estimates(draw(10), questions=np.arange(10) // 2)), "questions"),
        (lambda: bootstrap(draw(10), questions=np.zeros(9)), "length 10"),
        (lambda: Estimates(draw(10), replicates=0), "replicates"),
    ],
)
def test_mismatch_is_refused(call, named):
    with pytest.raises(ValueError, match=named):
        call()


def test_percentiles_are_shifted_and_clipped():
    values = np.array([0.0, 0.2, 0.4, np.nan])
    interval = shifted_percentiles(0.1, values, level=1.0, lower=0.0)
    assert (interval.low, interval.high) == pytest.approx((0.0, 0.3))


@pytest.mark.timing
@pytest.mark.slow
def test_a_thousand_replicates_of_twenty_thousand_predictions():
    data = draw(20_000, decimals=12)  # all confidences differ: the slowest case
    start = time.process_time()
    bootstrap(data, replicates=1000)
    assert time.process_time() - start < allowed(2)
