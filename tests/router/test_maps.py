"""Maps against scikit-learn, and their transfer: useful where both data sets err alike, harmful where they do not."""

import numpy as np
import pytest
from scipy.optimize import minimize
from sklearn.isotonic import IsotonicRegression

from coca_mindspeed.evaluation.metrics import calibration_metrics
from coca_router.calibrate import cross_fitted, fit_map


def overconfident(n, seed=0):
    rng = np.random.default_rng(seed)
    s = rng.uniform(0.02, 0.98, n).round(3)
    return s, rng.random(n) < s**2


def test_isotonic_is_scikit_learns():
    s, y = overconfident(1500)
    oracle = IsotonicRegression(out_of_bounds="clip", y_min=0, y_max=1).fit(s, y)
    at = np.linspace(0, 1, 301)
    assert fit_map("isotonic", s, y)(at) == pytest.approx(oracle.predict(at))


def test_the_logistic_map_has_the_largest_likelihood():
    s, y = overconfident(800)
    curve = fit_map("platt", s, y)

    def loss(weights):
        score = weights[0] * np.log(s / (1 - s)) + weights[1]
        return float(np.sum(np.logaddexp(0, score) - y * score))

    best = minimize(loss, np.zeros(2), method="Nelder-Mead", options={"xatol": 1e-8, "fatol": 1e-10})
    assert loss(curve.coefficients) == pytest.approx(best.fun, abs=1e-3)
    found = curve(np.array([0.3, np.nan]))
    assert found[0] == pytest.approx(1 / (1 + np.exp(-best.x[0] * np.log(0.3 / 0.7) - best.x[1])), abs=1e-3)
    assert np.isnan(found[1])


@pytest.mark.parametrize("kind", ["platt", "isotonic"])
def test_no_map_ever_falls(kind):
    s, y = overconfident(300)
    for labels in (y, ~y):
        curve = fit_map(kind, s, labels)
        values = curve(np.linspace(0, 1, 200))
        assert (np.diff(values) >= -1e-12).all()
        assert ((values >= 0) & (values <= 1)).all()
    separable = fit_map(kind, np.array([0.1, 0.2, 0.8, 0.9]), np.array([False, False, True, True]))
    assert np.isfinite(separable(np.array([0.0, 0.5, 1.0]))).all()
    with pytest.raises(ValueError, match="all equal"):
        fit_map(kind, s, np.ones(300, bool))


def test_cross_fitting_never_shows_a_question_its_own_labels():
    s, y = overconfident(400)
    ids = [str(i // 4) for i in range(400)]
    before = cross_fitted("isotonic", s, y, ids)
    flipped = y.copy()
    flipped[:4] = ~flipped[:4]  # all samples of one question
    assert before[:4] == pytest.approx(cross_fitted("isotonic", s, flipped, ids)[:4])
    assert calibration_metrics(before, y).values["ece"] < calibration_metrics(s, y).values["ece"] / 2
    with pytest.raises(ValueError, match="folds"):
        cross_fitted("platt", s[:8], y[:8], ids[:8])
