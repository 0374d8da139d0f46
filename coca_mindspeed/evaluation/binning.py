"""Ten bins of confidence for calibration errors, and the error of accepting answers from a threshold on.

Equal-width bins are closed on the right, the first also on the left: [0, 0.1], (0.1, 0.2], ..., (0.9, 1].  Closed on
the left they are [0, 0.1), ..., [0.8, 0.9), [0.9, 1].  Each edge is the float nearest to the exact decimal, so that a
confidence written "0.3" lies in (0.2, 0.3] or in [0.3, 0.4).  ``numpy.linspace(0, 1, 11)`` does not have this
property: its fourth edge is 0.30000000000000004.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.special import betaincinv

Floats = npt.NDArray[np.float64]
BinsClosed = Literal["right", "left"]


def check_confidence(confidence: npt.NDArray[Any]) -> None:
    """Raise unless ``confidence`` is a float32 or float64 vector of values in [0, 1] or NaN."""
    if confidence.ndim != 1:
        raise ValueError(f"confidence should have shape [n], found {list(confidence.shape)}")
    if confidence.dtype not in (np.float32, np.float64):
        raise TypeError(f"confidence should be float64 or float32, found {confidence.dtype}")
    if bool(np.any((confidence < 0) | (confidence > 1))):
        raise ValueError("confidence should lie in [0, 1], NaN where invalid; found a value outside")


def binomial_low(right: Any, count: Any, tail: float) -> Floats:
    """Exact lower bound of a proportion (Clopper and Pearson, 1934), elementwise; NaN where ``count`` is 0.

    It exceeds the true proportion with probability at most ``tail``.  The numbers need not be whole.
    """
    right, count = np.asarray(right, dtype=np.float64), np.asarray(count)
    with np.errstate(invalid="ignore", divide="ignore"):
        low = betaincinv(np.where(right > 0, right, 1.0), count - right + 1, tail)
    return np.where(count == 0, np.nan, np.where(right > 0, low, 0.0))


def clopper_pearson(right: Any, count: Any, level: float = 0.95) -> tuple[Floats, Floats]:
    """Return the exact binomial interval of a proportion, elementwise; NaN where ``count`` is 0."""
    tail = (1 - level) / 2
    return binomial_low(right, count, tail), 1 - binomial_low(np.asarray(count) - right, count, tail)


def bin_edges(dtype: npt.DTypeLike = np.float64) -> npt.NDArray[Any]:
    """Return the ``[11]`` edges of ten equal-width bins from 0 to 1, in the dtype of the confidences."""
    # k / 10 is the correctly rounded quotient, in other words the float nearest to the exact edge.
    return (np.arange(11) / 10).astype(dtype)


def bin_index(
    confidence: npt.NDArray[Any], edges: npt.NDArray[Any], closed: BinsClosed = "right"
) -> npt.NDArray[np.intp]:
    """Return the bin of each valid confidence, ``[n]``.

    Closed on the right: i where ``edges[i] < s <= edges[i + 1]``, and 0 for s = 0.  Closed on the left: i where
    ``edges[i] <= s < edges[i + 1]``, and the last bin for s = 1.
    """
    return np.searchsorted(edges[1:-1], confidence, side="left" if closed == "right" else "right")


@dataclass(frozen=True, slots=True)
class BinTable:
    """A reliability table; arrays are ``[bins]``, ``edges`` is ``[bins + 1]``.

    ``confidence`` and ``accuracy`` are means; ``low`` and ``high`` bound the accuracy.  Empty bins are NaN.
    """

    edges: Floats
    count: npt.NDArray[np.int64]
    confidence: Floats
    accuracy: Floats
    low: Floats
    high: Floats


def bin_table(confidence: npt.NDArray[Any], correct: npt.NDArray[np.bool_], closed: BinsClosed = "right") -> BinTable:
    """Compute a reliability table over ten bins of equal width; invalid (NaN) confidences are left out."""
    check_confidence(confidence)
    valid = ~np.isnan(confidence)
    confidence, correct = confidence[valid], correct[valid]
    edges = bin_edges(confidence.dtype)
    index = bin_index(confidence, edges, closed)
    count = np.bincount(index, minlength=10)
    right = np.bincount(index, weights=correct, minlength=10)
    total = np.bincount(index, weights=confidence.astype(np.float64), minlength=10)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean_confidence, accuracy = total / count, right / count
    return BinTable(edges.astype(np.float64), count, mean_confidence, accuracy, *clopper_pearson(right, count))


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
    needs ``coca-router calibrate --risk``.
    """
    check_confidence(confidence)
    taken = confidence >= np.asarray(thresholds)[:, None]  # (thresholds, n)
    accepted, wrong = taken.sum(axis=1), (taken & ~correct).sum(axis=1)
    low, high = clopper_pearson(wrong, accepted)
    with np.errstate(invalid="ignore"):
        columns = (accepted / np.float64(len(correct)), wrong / accepted, low, high)
    return [
        RiskRow(float(threshold), int(count), *map(float, row))
        for threshold, count, *row in zip(thresholds, accepted, *columns, strict=True)
    ]
