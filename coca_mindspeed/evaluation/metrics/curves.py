"""Curves over thresholds of confidence: risk against coverage, and hits against false alarms (ROC)."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.stats import beta

from coca_mindspeed.evaluation.metrics.binning import check_confidence
from coca_mindspeed.evaluation.metrics.weighted import Floats


def _by_confidence(confidence: npt.NDArray[Any], correct: npt.NDArray[np.bool_]) -> tuple[Floats, Floats]:
    """Accepted and right answers (G + 1,) as the threshold falls past each distinct confidence, from (0, 0)."""
    valid = ~np.isnan(confidence)
    values, group = np.unique(-confidence[valid], return_inverse=True)
    count = np.bincount(group, minlength=len(values)).astype(np.float64)
    right = np.bincount(group, weights=correct[valid], minlength=len(values))
    return np.concatenate([[0.0], np.cumsum(count)]), np.concatenate([[0.0], np.cumsum(right)])


def risk_coverage(confidence: npt.NDArray[Any], correct: npt.NDArray[np.bool_]) -> tuple[Floats, Floats]:
    """Error rate of the accepted answers (G,) at each reachable coverage (G,) of the valid ones, from low to high.

    Args:
        confidence: (n,), NaN where invalid.
        correct: (n,).
    """
    accepted, right = _by_confidence(confidence, correct)
    if len(accepted) == 1:
        return np.array([]), np.array([])
    return accepted[1:] / accepted[-1], 1 - right[1:] / accepted[1:]


def roc(confidence: npt.NDArray[Any], correct: npt.NDArray[np.bool_]) -> tuple[Floats, Floats]:
    """False-alarm rate (G + 1,) and hit rate (G + 1,); the area below is AUROC.  Empty where that is undefined."""
    accepted, right = _by_confidence(confidence, correct)
    wrong = accepted - right
    if right[-1] == 0 or wrong[-1] == 0:
        return np.array([]), np.array([])
    return wrong / wrong[-1], right / right[-1]


THRESHOLDS = (0.99, 0.95, 0.9, 0.8, 0.7, 0.6, 0.5, 0.25, 0.0)


class RiskRow(NamedTuple):
    """What accepting from a threshold on means.

    Attributes:
        threshold: lowest stated confidence that is accepted.
        accepted: answers.
        coverage: their share of all answers, invalid confidences included; NaN where there are none.
        risk: share of wrong ones among the accepted, NaN where none is.
        low: exact 95% interval of the risk, NaN where none is accepted.
        high: see ``low``.
    """

    threshold: float
    accepted: int
    coverage: float
    risk: float
    low: float
    high: float


def risk_table(
    confidence: npt.NDArray[Any], correct: npt.NDArray[np.bool_], thresholds: Sequence[float] = THRESHOLDS
) -> list[RiskRow]:
    """Coverage and error by threshold.

    The intervals are of one threshold each and take every answer for a question of its own: one that was chosen by
    looking at the table needs ``calibrate --risk``.

    Args:
        confidence: (n,), NaN where invalid; those are never accepted.
        correct: (n,).
        thresholds: lowest accepted confidences.
    """
    check_confidence(confidence)
    if confidence.shape != correct.shape:
        raise ValueError(f"arrays should have one length, found {confidence.shape} and {correct.shape}")
    rows = []
    for threshold in thresholds:
        with np.errstate(invalid="ignore"):
            taken = confidence >= threshold
        accepted, wrong = int(taken.sum()), int((taken & ~correct).sum())
        risk = low = high = float("nan")
        if accepted:
            risk = wrong / accepted
            low = 0.0 if not wrong else float(beta.ppf(0.025, wrong, accepted - wrong + 1))
            high = 1.0 if wrong == accepted else float(beta.ppf(0.975, wrong + 1, accepted - wrong))
        coverage = accepted / len(correct) if len(correct) else float("nan")
        rows.append(RiskRow(threshold, accepted, coverage, risk, low, high))
    return rows
