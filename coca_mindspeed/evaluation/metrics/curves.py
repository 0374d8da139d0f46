"""Curves over thresholds of confidence: risk against coverage, and hits against false alarms (ROC)."""

from typing import Any

import numpy as np
import numpy.typing as npt

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
