"""Curves over confidence thresholds: risk against coverage, and ROC."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from coca_mindspeed.evaluation.metrics.binning import Floats, check_confidence, clopper_pearson


def _by_confidence(confidence: npt.NDArray[Any], correct: npt.NDArray[np.bool_]) -> tuple[Floats, Floats]:
    """Accepted and correct answers (G + 1,) as the threshold passes each distinct confidence, from (0, 0)."""
    valid = ~np.isnan(confidence)
    values, group = np.unique(-confidence[valid], return_inverse=True)
    count = np.bincount(group, minlength=len(values)).astype(np.float64)
    right = np.bincount(group, weights=correct[valid], minlength=len(values))
    return np.concatenate([[0.0], np.cumsum(count)]), np.concatenate([[0.0], np.cumsum(right)])


def risk_coverage(confidence: npt.NDArray[Any], correct: npt.NDArray[np.bool_]) -> tuple[Floats, Floats]:
    """Return coverage (G,) of the valid answers, ascending, and the error rate (G,) of the accepted ones."""
    accepted, right = _by_confidence(confidence, correct)
    if len(accepted) == 1:
        return np.array([]), np.array([])
    return accepted[1:] / accepted[-1], 1 - right[1:] / accepted[1:]


def roc(confidence: npt.NDArray[Any], correct: npt.NDArray[np.bool_]) -> tuple[Floats, Floats]:
    """Return false and true positive rate (G + 1,) each; empty where AUROC is undefined."""
    accepted, right = _by_confidence(confidence, correct)
    wrong = accepted - right
    if right[-1] == 0 or wrong[-1] == 0:
        return np.array([]), np.array([])
    return wrong / wrong[-1], right / right[-1]


THRESHOLDS = (0.99, 0.95, 0.9, 0.8, 0.7, 0.6, 0.5, 0.25, 0.0)


class RiskRow(NamedTuple):
    """Coverage and error of accepting answers from ``threshold`` on; NaN where undefined.

    ``coverage`` is of all answers, invalid confidences included; ``low`` and ``high`` bound the risk (exact, 95%).
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
    """Return coverage and error of each threshold; invalid (NaN) confidences are never accepted.

    Each interval holds for one threshold and treats answers as independent.  A threshold chosen by looking at the table
    needs ``calibrate --risk``.
    """
    check_confidence(confidence)
    if confidence.shape != correct.shape:
        raise ValueError(f"arrays should have one length, found {confidence.shape} and {correct.shape}")
    taken = confidence >= np.asarray(thresholds)[:, None]  # (thresholds, n)
    accepted, wrong = taken.sum(axis=1), (taken & ~correct).sum(axis=1)
    low, high = clopper_pearson(wrong, accepted)
    with np.errstate(invalid="ignore"):
        columns = (accepted / np.float64(len(correct)), wrong / accepted, low, high)
    return [
        RiskRow(float(threshold), int(count), *map(float, row))
        for threshold, count, *row in zip(thresholds, accepted, *columns, strict=True)
    ]


class SuggestedThreshold(NamedTuple):
    """The threshold that tells right from wrong answers best; no certificate, since these answers chose it."""

    threshold: float
    coverage: float  # accepted share of all answers, invalid confidences included
    risk: float  # error of the accepted


def suggested_threshold(confidence: npt.NDArray[Any], correct: npt.NDArray[np.bool_]) -> SuggestedThreshold | None:
    """Return the threshold above which right answers exceed wrong ones by most; None where they never do.

    Accepting from there on and rejecting below is right for most answers.  Of equal thresholds it is the highest.
    """
    accepted, right = _by_confidence(confidence, correct)
    best = int(np.argmax(2 * right - accepted))
    if best == 0:
        return None
    threshold = -np.unique(-confidence[~np.isnan(confidence)])[best - 1]
    return SuggestedThreshold(float(threshold), accepted[best] / len(correct), 1 - right[best] / accepted[best])
