"""Do 95% intervals hold where nothing bad, or next to nothing, was seen?  Every possible outcome, with its probability.

All questions have one law here, so an outcome is a number of wrong answers and coverage is a sum over binomial
probabilities; no simulation.  Laws with more to them: ``test_coverage.py``.
"""

import itertools
from functools import cache

import numpy as np
import pytest
from scipy.stats import binom, multinomial

from coca_mindspeed.evaluation.intervals import Estimates, paired_intervals
from coca_mindspeed.evaluation.predictions import Outcomes

LEAST = 0.93
CONFIDENCES = (0.9, 0.95, 0.99, 1.0)
CORRECT = (0.9, 0.95, 0.99, 0.995)
SIZES = (30, 200, 1000)


@cache
def one_confidence(confidence, wrong, n):
    right = np.random.default_rng(wrong).permutation(n) >= wrong
    return Estimates(Outcomes(np.full(n, float(confidence)), right, np.full(n, np.nan)))


def likely(probability):
    return np.flatnonzero(probability > 1e-7)


def holds(interval, true):
    return interval.low - 1e-9 <= true <= interval.high + 1e-9


def truth(metric, confidence, correct):
    if metric == "brier":
        return correct * (1 - confidence) ** 2 + (1 - correct) * confidence**2
    return abs(confidence - correct) if metric == "ece" else correct


def coverage(metric, confidence, correct, n):
    probability = binom.pmf(np.arange(n + 1), n, 1 - correct)
    true = truth(metric, confidence, correct)
    return sum(
        probability[wrong]
        for wrong in likely(probability)
        if holds(one_confidence(confidence, int(wrong), n).interval(metric), true)
    )


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("confidence", CONFIDENCES)
@pytest.mark.parametrize("metric", ["accuracy", "brier", "ece"])
def test_sure_and_nearly_always_right(metric, confidence, n):
    found = {correct: coverage(metric, confidence, correct, n) for correct in CORRECT}
    assert min(found.values()) >= LEAST, found


@pytest.mark.parametrize(("rare", "common"), [(30, 30), (30, 300), (200, 200)])
@pytest.mark.parametrize("rare_is_right", [True, False])
def test_auroc_near_one(rare, common, rare_is_right):
    # Of the rarer kind a share is on the wrong side of all of the other.
    confidence, correct = np.full(rare + common, 0.5), np.arange(rare + common) < rare
    intervals = []
    for misplaced in range(rare + 1):
        confidence[:rare] = np.where(np.arange(rare) < misplaced, 0.2, 0.8)
        both = (confidence, correct) if rare_is_right else (1 - confidence, ~correct)
        intervals.append(Estimates(Outcomes(*both, np.full(rare + common, np.nan))).interval("auroc"))
    for share in (0.002, 0.01, 0.03, 0.06, 0.1):
        probability = binom.pmf(np.arange(rare + 1), rare, share)
        held = [holds(interval, 1 - share) for interval in intervals]
        assert probability @ held >= LEAST, share


@pytest.mark.parametrize("confidence", [0.9, 0.99])
@pytest.mark.parametrize(
    ("n", "shares"),
    [*itertools.product([30, 200], [(0.0, 0.01), (0.005, 0.01), (0.0, 0.03)]), (30, (0.01, 0.01)), (30, (0.02, 0.05))],
)
def test_differences_of_two_methods_that_are_nearly_always_right(shares, n, confidence):
    held = {"accuracy": 0.0, "brier": 0.0}
    gap = shares[0] - shares[1]  # right where the other is wrong: second - first
    true = {"accuracy": gap, "brier": -gap * (2 * confidence - 1)}
    law, index = multinomial(n, [*shares, 1 - sum(shares)]), np.arange(n)
    most = [int(likely(binom.pmf(index, n, share)).max(initial=0)) for share in shares]
    for gained, lost in itertools.product(*(range(m + 1) for m in most)):
        probability = law.pmf([gained, lost, n - gained - lost])
        if gained + lost > n or probability < 1e-7:
            continue
        right = (index >= gained, (index < gained) | (index >= gained + lost))
        first, second = (Estimates(Outcomes(np.full(n, confidence), each, np.full(n, np.nan))) for each in right)
        found = paired_intervals(first, second)
        for metric in held:
            held[metric] += probability * holds(found[metric], true[metric])
    assert min(held.values()) >= LEAST, held
