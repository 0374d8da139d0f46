"""Every number against the plain way of computing it."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coca_mindspeed.evaluation.metrics.calibration import calibration_metrics
from coca_mindspeed.evaluation.metrics.curves import risk_table, suggested_threshold

_ROWS = st.lists(
    st.tuples(st.sampled_from([0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0]), st.booleans()), min_size=1, max_size=7
)


def arrays(rows):
    return np.array([s for s, _ in rows]), np.array([y for _, y in rows])


def smooth_ece(s, y):
    return calibration_metrics(s, y).smooth_ece


def plain_smooth_ece(s, y):
    """By quadrature and the reflected kernel written out, at one width after the other."""

    def error(width):
        t = (np.arange(1000) + 0.5) / 1000
        total = np.zeros_like(t)
        for s_i, y_i in zip(s, y, strict=True):
            for image in itertools.chain(*((s_i + 2 * k, -s_i + 2 * k) for k in range(-6, 7))):
                total += (y_i - s_i) * np.exp(-(((t - image) / width) ** 2) / 2) / (width * math.sqrt(2 * math.pi))
        return float(np.abs(total).mean() / len(s))

    low, high = 0.005, 1.0
    while high - low > 1e-4:
        low, high = ((low + high) / 2, high) if error((low + high) / 2) > (low + high) / 2 else (low, (low + high) / 2)
    return low


@pytest.mark.parametrize("seed", range(3))
def test_smooth_ece(seed):
    rng = np.random.default_rng(seed)
    s = rng.random(40).round(2)
    y = rng.random(40) < s**2
    assert smooth_ece(s, y) == pytest.approx(plain_smooth_ece(s, y), abs=4e-3)


def test_smooth_ece_of_what_is_known():
    rng = np.random.default_rng(0)
    s = rng.random(20_000)
    assert smooth_ece(s, rng.random(20_000) < s) < 0.02
    # Always wrong and sure of it: the whole residual is -1 at one place.
    assert smooth_ece(np.ones(50), np.zeros(50, bool)) == pytest.approx(1.0, abs=0.02)
    invalid = np.array([math.nan, 0.5])
    assert smooth_ece(invalid, np.array([True, True])) == smooth_ece(invalid[1:], np.array([True]))
    assert math.isnan(smooth_ece(invalid[:1], np.array([True])))


@settings(deadline=None)
@given(_ROWS)
def test_ks(rows):
    s, y = arrays(rows)
    plain = max(abs(sum(b - a for a, b in rows if a <= t)) for t, _ in rows) / len(rows)
    assert calibration_metrics(s, y).ks == pytest.approx(plain)


@settings(deadline=None)
@given(_ROWS)
def test_excess_aurc(rows):
    def aurc(order):
        errors = np.cumsum([not y for _, y in order])
        return float(np.mean(errors / np.arange(1, len(order) + 1)))

    s, y = arrays(rows)
    # Ties in every order: the mean over all orders in which confidence falls.
    orders = [o for o in itertools.permutations(rows) if all(a[0] >= b[0] for a, b in itertools.pairwise(o))]
    expected = np.mean([aurc(order) for order in orders]) - aurc(sorted(rows, key=lambda row: not row[1]))
    assert calibration_metrics(s, y).excess_aurc == pytest.approx(expected, abs=1e-12)


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
    assert found == (None if expected is None else pytest.approx(expected))


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
    assert math.isnan(risk_table(s, y, (1.0,))[0].risk) is False
    assert math.isnan(risk_table(s[3:], y[3:], (0.9,))[0].risk)
