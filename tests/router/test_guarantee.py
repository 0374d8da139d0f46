"""Certified errors: exact tails, the sequence, and how often the promise is broken."""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coca_router.calibration import certify, least_labels, p_value, upper_bound


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
    """The lowest threshold of the grid that passes: runs from two starts, each with half of the level."""
    valid = sum(s >= 0 for s in stated)
    least = math.ceil(math.log(1 - level) / math.log(1 - risk))
    if valid < 2 * least:
        starts = [(least, 1.0)]
    else:
        starts = [(max(2 * least, share * valid), weight) for share, weight in ((0.1, 0.5), (0.3, 0.5))]
    found, alpha = None, 0.0
    for hundredth in range(100, -1, -1):
        labels = [y for s, y in zip(stated, correct, strict=True) if s >= hundredth / 100]
        begun = [(count, weight) for count, weight in starts if len(labels) >= count]
        starts = starts[len(begun) :]
        alpha += (1 - level) * sum(weight for _, weight in begun)
        wrong = len(labels) - sum(labels)
        tail = sum(math.comb(len(labels), j) * risk**j * (1 - risk) ** (len(labels) - j) for j in range(wrong + 1))
        if alpha > 0 and tail <= alpha:
            found = hundredth / 100
        else:
            alpha = 0.0
    return found


@pytest.mark.parametrize("seed", range(12))
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
    "a few overconfident": lambda s: np.where(s > 0.98, 0.5, np.where(s > 0.5, 0.97, 0.4)),
    "bad above every start": lambda s: np.where(s > 0.94, 0.8, np.where(s > 0.79, 0.85, 0.895)),
    "steps at the starts": lambda s: np.where(s > 0.95, 1.0, np.where(s > 0.8, 0.75, np.where(s > 0.5, 1.0, 0.7))),
}


@pytest.mark.parametrize(
    "name", [*list(TRUTHS)[:4], *(pytest.param(name, marks=pytest.mark.nightly) for name in list(TRUTHS)[4:])]
)
def test_the_certified_error_is_exceeded_in_at_most_one_set_in_twenty(name):
    """1,000 calibration sets whose truth is known; the error of what is accepted is computed, not sampled."""
    grid = np.arange(101) / 100
    right = TRUTHS[name](grid)
    # Error of accepting from each hundredth on.
    error = np.cumsum((1 - right)[::-1])[::-1] / np.arange(101, 0, -1)
    rng = np.random.default_rng(7)
    broken = certified = 0
    for _ in range(1000):
        place = rng.integers(0, 101, size=400)
        correct = rng.random(400) < right[place]
        found = certify(grid[place], correct, risk=0.1, confidence=0.95)
        if found.threshold is not None:
            certified += 1
            broken += error[round(found.threshold * 100)] > 0.1 + 1e-12
    assert broken <= 0.05 * 1000
    # A few overconfident answers at the top do not hide the sure ones below.
    assert certified > {"sure above 0.8": 450, "a few overconfident": 250}.get(name, -1)


def test_the_least_number_of_labels():
    assert least_labels(0.05, 0.95) == 59
    few = certify(np.full(58, 0.9), np.ones(58, bool), risk=0.05, confidence=0.95)
    assert few.threshold is None
    assert "59" in few.sentence()
    enough = certify(np.full(59, 0.9), np.ones(59, bool), risk=0.05, confidence=0.95)
    assert (enough.threshold, enough.wrong, enough.accepted) == (0.0, 0, 59)
    nothing = certify(np.array([math.nan] * 5), np.ones(5, bool), risk=0.05, confidence=0.95)
    assert (nothing.threshold, nothing.accepted) == (None, 0)
    assert "59" in nothing.sentence()


def test_a_refusal_with_enough_labels_names_the_error_that_was_reached():
    """200 answers at one confidence, 100 of them wrong: the bound of their error, and no word of more labels alone."""
    found = certify(np.full(200, 0.9), np.arange(200) % 2 == 0, risk=0.25, confidence=0.95)
    assert found.threshold is None
    assert (found.accepted, found.wrong) == (200, 100)
    assert 0.5 < found.bound < 0.57
    assert all(figure in found.sentence() for figure in (f"{found.bound:.3g}", "100 of 200"))


def test_a_refusal_names_a_threshold_that_accepts_enough_labels():
    """The 20 surest of 191 are right, which is too few; of the 70 surest 14 are wrong, and of all 60."""
    stated = np.concatenate([np.full(20, 0.97), np.full(50, 0.9), np.full(121, 0.5), np.full(9, math.nan)])
    correct = np.ones(200, bool)
    correct[20:34] = correct[70:116] = False
    found = certify(stated, correct, risk=0.05, confidence=0.95)
    assert (found.threshold, found.accepted, found.wrong) == (None, 70, 14)
    assert found.bound == pytest.approx(upper_bound(14, 70, 0.95))
    assert all(figure in found.sentence() for figure in ("200", "59", "14 of 70", f"{found.bound:.3g}"))
    few = certify(stated[150:], correct[150:], risk=0.05, confidence=0.95)
    assert (few.threshold, few.accepted, few.wrong) == (None, 41, 0)
    assert all(figure in few.sentence() for figure in ("50", "59", "41"))
