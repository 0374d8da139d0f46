"""Certified errors: exact tails, the sequence, and how often the promise is broken."""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coca_mindspeed.calibration.guarantee import certify, least_labels, p_value, upper_bound


@settings(deadline=None)
@given(st.integers(1, 40), st.data())
def test_the_tail_is_the_sum_of_exact_fractions(m, data):
    k = data.draw(st.integers(0, m))
    risk = Fraction(data.draw(st.integers(1, 99)), 100)
    exact = sum(math.comb(m, j) * risk**j * (1 - risk) ** (m - j) for j in range(k + 1))
    assert p_value(k, m, float(risk)) == pytest.approx(float(exact), rel=1e-9)
    bound = upper_bound(k, m, 0.95)
    assert bound == 1 if k == m else p_value(k, m, bound) == pytest.approx(0.05, rel=1e-6)


def plainly(stated, correct, risk, level):
    """The lowest threshold of the grid that is reached before the first failing test."""
    found = None
    least = math.ceil(math.log(1 - level) / math.log(1 - risk))
    start = 2 * least if sum(s >= 0 for s in stated) >= 2 * least else least
    for hundredth in range(100, -1, -1):
        labels = [y for s, y in zip(stated, correct, strict=True) if s >= hundredth / 100]
        if len(labels) < start:
            continue
        wrong = len(labels) - sum(labels)
        tail = sum(math.comb(len(labels), j) * risk**j * (1 - risk) ** (len(labels) - j) for j in range(wrong + 1))
        if tail > 1 - level:
            break
        found = hundredth / 100
    return found


@pytest.mark.parametrize("seed", range(30))
def test_the_sequence_against_the_plain_way(seed):
    rng = np.random.default_rng(seed)
    stated = rng.beta(2, 1, size=300).round(2)
    stated[rng.random(300) < 0.1] = math.nan
    correct = rng.random(300) < np.nan_to_num(stated) ** rng.uniform(0.05, 1)
    found = certify(stated, correct, risk=0.2, confidence=0.9)
    assert found.threshold == plainly(stated, correct.tolist(), 0.2, 0.9)
    if found.threshold is not None:
        assert (found.accepted, found.wrong) == (
            int((stated >= found.threshold).sum()), int((~correct & (stated >= found.threshold)).sum()))  # fmt: skip
        assert found.bound <= 0.2


# The chance of being right at each stated confidence, whose distribution is uniform on hundredths.
TRUTHS = {
    "calibrated": lambda s: s,
    "overconfident": lambda s: s**3,
    "sure above 0.8": lambda s: np.where(s >= 0.8, 0.97, 0.3),
    "worst at the top": lambda s: np.where(s > 0.97, 0.2, np.where(s > 0.6, 1.0, 0.5)),
    "at the limit": lambda s: np.full_like(s, 0.9),
    "in waves": lambda s: 0.9 + 0.1 * np.sin(40 * s),
}


@pytest.mark.parametrize("name", TRUTHS)
def test_the_certified_error_is_exceeded_in_at_most_one_set_in_twenty(name):
    """2,000 calibration sets whose truth is known; the error of what is accepted is computed, not sampled."""
    grid = np.arange(101) / 100
    right = TRUTHS[name](grid)
    # Error of accepting from each hundredth on.
    error = np.cumsum((1 - right)[::-1])[::-1] / np.arange(101, 0, -1)
    rng = np.random.default_rng(7)
    broken = certified = 0
    for _ in range(2000):
        place = rng.integers(0, 101, size=400)
        correct = rng.random(400) < right[place]
        found = certify(grid[place], correct, risk=0.1, confidence=0.95, estimate_labels=False)
        if found.threshold is not None:
            certified += 1
            broken += error[round(found.threshold * 100)] > 0.1 + 1e-12
    assert broken <= 0.05 * 2000
    if name == "sure above 0.8":
        assert certified > 900


def test_when_nothing_can_be_certified_it_says_how_many_labels_would_do():
    assert least_labels(0.05, 0.95) == 59
    stated = np.full(40, 0.9)
    few = certify(stated, np.ones(40, bool), risk=0.05, confidence=0.95)
    assert (few.threshold, few.labels_needed) == (None, 59)
    assert "about 59 labels would do" in few.sentence()
    hopeless = certify(stated, np.arange(40) % 2 == 0, risk=0.05, confidence=0.95)
    assert (hopeless.threshold, hopeless.labels_needed) == (None, None)
    assert "no number of labels" in hopeless.sentence()
    enough = certify(np.full(59, 0.9), np.ones(59, bool), risk=0.05, confidence=0.95)
    assert (enough.threshold, enough.wrong, enough.accepted) == (0.0, 0, 59)
    assert "certified" in enough.sentence()
    nothing = certify(np.array([math.nan] * 5), np.ones(5, bool), risk=0.05, confidence=0.95)
    assert nothing.threshold is None


def test_more_labels_do_not_help_where_the_surest_answers_are_wrong_too_often():
    """The test goes from the top down and ends where it first fails; a better share below is never reached."""
    stated = np.repeat([0.99, 0.5], [150, 850])
    correct = np.arange(1000) >= 20
    found = certify(stated, correct, risk=0.05, confidence=0.95)
    assert (found.threshold, found.labels_needed) == (None, None)


def test_the_labels_that_would_do_do():
    stated, correct = np.repeat([0.99, 0.5], [20, 20]), np.arange(40) != 30
    found = certify(stated, correct, risk=0.05, confidence=0.95)
    assert found.threshold is None
    assert found.labels_needed is not None
    times = math.ceil(found.labels_needed / 40)
    assert times > 1
    more = certify(np.tile(stated, times), np.tile(correct, times), risk=0.05, confidence=0.95)
    assert more.threshold is not None
