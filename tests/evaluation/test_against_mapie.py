"""The certificate beside MAPIE's fixed-sequence testing, on data where both compute the same.

MAPIE takes the smaller of two valid p-values, of which the binomial tail is the smaller wherever the share of wrong
answers is below the risk.  It counts the wrong ones as ceil(n * (k / n)), which rounding makes k + 1 for some k and n;
such cases are left out.
"""

import math
import warnings

import numpy as np
import pytest
from mapie.risk_control import BinaryClassificationController, BinaryRisk
from mapie.risk_control.methods import compute_hoeffding_bentkus_p_value

from coca_mindspeed.evaluation.calibration.guarantee import certify, least_labels, p_value


def counts_exactly(wrong, accepted):
    return math.ceil(accepted * (wrong / accepted)) == wrong


@pytest.mark.parametrize("risk", [0.02, 0.1, 0.3])
def test_p_values(risk):
    compared = 0
    for accepted in range(1, 400, 7):
        for wrong in range(math.ceil(risk * accepted)):
            if counts_exactly(wrong, accepted):
                share = np.array([wrong / accepted])
                [[theirs]] = compute_hoeffding_bentkus_p_value(share, np.array([accepted]), risk, binary=True)
                assert p_value(wrong, accepted, risk) == pytest.approx(theirs, rel=1e-9)
                compared += 1
    assert compared > 100


def mapie_threshold(stated, correct, risk, confidence, tested):
    """The lowest of the tested thresholds whose error MAPIE controls, None where it controls none."""
    error = BinaryRisk(
        risk_occurrence=lambda y_true, y_pred: y_true != y_pred,
        risk_condition=lambda y_true, y_pred: y_pred == 1,
        higher_is_better=False,
    )
    controller = BinaryClassificationController(
        predict_function=lambda s: np.stack([1 - s, s], axis=1),
        risk=error,
        target_level=risk,
        confidence_level=confidence,
        best_predict_param_choice="recall",
        list_predict_params=np.sort(tested),
        fwer_method="fixed_sequence",
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that nothing is controlled, or that the error does not fall everywhere
        controller.calibrate(stated, correct.astype(int))
    return min(controller.valid_predict_params, default=None)


@pytest.mark.parametrize(("risk", "confidence"), [(0.1, 0.95), (0.2, 0.9), (0.05, 0.8)])
def test_thresholds(risk, confidence):
    rng = np.random.default_rng(3)
    compared, none = 0, 0
    for _ in range(80):
        # A third of the answers or more state 1: both of our starts are at the top, which is the sequence of MAPIE.
        stated = np.minimum(1, 1.3 * rng.beta(3, 1, size=400)).round(int(rng.integers(1, 3)))
        correct = rng.random(400) < 1 - (1.03 - stated) * rng.uniform(0.2, 4.0)
        ours = certify(stated, correct, risk=risk, confidence=confidence)
        grid = np.arange(101) / 100
        accepted = np.array([(stated >= t).sum() for t in grid])
        wrong = np.array([(~correct & (stated >= t)).sum() for t in grid])
        tested = accepted >= 2 * least_labels(risk, confidence)
        errors = wrong[tested] / accepted[tested]
        # MAPIE tests from the easier end of the sequence, which is the top where errors grow downwards.
        falls = errors[0] > errors[-1]
        if not falls or not all(map(counts_exactly, wrong[tested].tolist(), accepted[tested].tolist())):
            continue
        theirs = mapie_threshold(stated, correct, risk, confidence, grid[tested])
        assert ours.threshold == theirs
        compared += 1
        none += theirs is None
    assert compared >= 12
    assert none < compared
