"""Calibration errors without bins, what ranking costs beyond the best one, and tables that people decide by."""

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.special import digamma

from coca_mindspeed.evaluation.metrics.binning import check_confidence
from coca_mindspeed.evaluation.metrics.weighted import Floats, MetricOptions, WeightedSample

_GRID = 1000
Labels = npt.NDArray[np.bool_]
Measure = Callable[[npt.NDArray[Any], Labels], float]


def _valid(confidence: npt.NDArray[Any], correct: Labels) -> tuple[Floats, Floats]:
    check_confidence(confidence)
    if confidence.shape != correct.shape:
        raise ValueError(f"arrays should have one length, found {confidence.shape} and {correct.shape}")
    kept = ~np.isnan(confidence)
    return confidence[kept].astype(np.float64), correct[kept].astype(np.float64)


def _of_valid(error: Callable[[Floats, Floats], float]) -> Measure:
    """The error over the valid confidences alone; NaN where there is none."""

    @wraps(error)
    def of_valid(confidence: npt.NDArray[Any], correct: Labels) -> float:
        s, y = _valid(confidence, correct)
        return error(s, y) if len(s) else float("nan")

    return of_valid


@_of_valid
def smooth_ece(s: Floats, y: Floats) -> float:
    """Calibration error smoothed by a Gaussian kernel that is reflected at 0 and 1 (Blasiok and Nakkiran, 2023).

    The width is the one that equals the error that it gives, so there is nothing to choose.  NaN where no confidence
    is valid.

    Args:
        s: confidence (n,), NaN where invalid.
        y: correct (n,).
    """
    places = np.minimum((s * _GRID).astype(np.intp), _GRID - 1)
    residual = np.bincount(places, weights=y - s, minlength=_GRID) / len(s)
    low, high = 1e-3, 1.0
    for _ in range(20):  # the error falls as the width grows, so the two meet once
        width = (low + high) / 2
        low, high = (width, high) if _smoothed(residual, width) > width else (low, width)
    return _smoothed(residual, (low + high) / 2)


def _smoothed(residual: Floats, width: float) -> float:
    """Integral of the absolute smoothed residuals.

    Reflected at both ends, a function on [0, 1] has period 2, and smoothing it damps each of its frequencies.
    """
    spectrum = np.fft.rfft(np.concatenate([residual, residual[::-1]]))
    damping = np.exp(-((np.pi * width * np.arange(len(spectrum))) ** 2) / 2)  # exp(-(2 pi f width)^2 / 2), f = k / 2
    return float(np.abs(np.fft.irfft(spectrum * damping, 2 * _GRID)[:_GRID]).sum())


@_of_valid
def ks_calibration_error(s: Floats, y: Floats) -> float:
    """Largest gap between the running sums of confidence and of correctness, by confidence (Gupta et al., 2021).

    Equal confidences count together.  NaN where no confidence is valid.

    Args:
        s: confidence (n,), NaN where invalid.
        y: correct (n,).
    """
    values, group = np.unique(s, return_inverse=True)
    running = np.cumsum(np.bincount(group, weights=y - s, minlength=len(values)))
    return float(np.abs(running).max() / len(s))


@_of_valid
def excess_aurc(s: Floats, y: Floats) -> float:
    """E-AURC: AURC less that of the best ranking of the same answers, which puts every right one first.

    Args:
        s: confidence (n,), NaN where invalid.
        y: correct (n,).
    """
    sample = WeightedSample(s, y.astype(np.bool_), None, MetricOptions())
    aurc = float(sample.metrics(np.ones((1, len(s))))["aurc"][0])
    n, wrong = len(y), len(y) - int(y.sum())
    right = n - wrong
    # With the right ones first, k accepted hold max(0, k - right) wrong ones: a sum of 1 - right / k.
    best = (wrong - right * float(digamma(n + 1) - digamma(right + 1))) / n if wrong else 0.0
    return aurc - best


class RiskRow(NamedTuple):
    """What accepting from a threshold on means.

    Attributes:
        threshold: lowest stated confidence that is accepted.
        accepted: answers.
        coverage: their share of all answers, invalid confidences included.
        risk: share of wrong ones among them, NaN where none is accepted.
        low: exact 95% interval of the risk.
        high: see ``low``.
    """

    threshold: float
    accepted: int
    coverage: float
    risk: float
    low: float
    high: float


def risk_table(
    confidence: npt.NDArray[Any],
    correct: Labels,
    thresholds: Sequence[float] = (0.99, 0.95, 0.9, 0.8, 0.7, 0.6, 0.5, 0.25, 0.0),
) -> list[RiskRow]:
    """Coverage and error by threshold.

    The intervals are of one threshold each: one that was chosen by looking at the table needs ``calibrate --risk``.

    Args:
        confidence: (n,), NaN where invalid.
        correct: (n,).
        thresholds: lowest accepted confidences.
    """
    from scipy.stats import beta

    s, y = _valid(confidence, correct)
    rows = []
    for threshold in thresholds:
        taken = s >= threshold
        accepted, wrong = int(taken.sum()), int((taken & (y == 0)).sum())
        low = 0.0 if not wrong else float(beta.ppf(0.025, wrong, accepted - wrong + 1))
        high = 1.0 if wrong == accepted else float(beta.ppf(0.975, wrong + 1, accepted - wrong))
        coverage = accepted / len(correct) if len(correct) else float("nan")
        if accepted:
            rows.append(RiskRow(threshold, accepted, coverage, wrong / accepted, low, high))
        else:
            rows.append(RiskRow(threshold, 0, coverage, float("nan"), float("nan"), float("nan")))
    return rows


Recalibration = Callable[[Floats], Floats]
Fit = Callable[[Floats, Labels], Recalibration]


def transfer_matrix(
    data: Mapping[str, tuple[npt.NDArray[Any], Labels]], fit: Fit, measure: Measure, *, folds: int = 5, seed: int = 0
) -> dict[str, dict[str, float]]:
    """Error on each data set after recalibrating by a map of each other one; and cross-fitted, by its own.

    Args:
        data: name -> confidence (n,), NaN where invalid, and correct (n,).
        fit: from confidences and labels to a map.
        measure: an error of confidences and labels.
        folds: of the diagonal, where a map must not have seen what it is tested on.
        seed: draws the folds.

    Returns:
        fitted on -> tested on -> error; ``none`` is fitted on nothing: the confidences as they were stated.
    """
    sets = {name: _valid(*pair) for name, pair in data.items()}
    matrix: dict[str, dict[str, float]] = {"none": {n: measure(s, y.astype(np.bool_)) for n, (s, y) in sets.items()}}
    for source, (s, y) in sets.items():
        row = matrix.setdefault(source, {})
        recalibrate = fit(s, y.astype(np.bool_))
        for target, (t, z) in sets.items():
            if target != source:
                row[target] = measure(recalibrate(t), z.astype(np.bool_))
                continue
            fold = np.random.default_rng(seed).permutation(len(s)) % folds
            after = np.empty_like(s)
            for index in range(folds):
                inside = fold == index
                after[inside] = fit(s[~inside], y[~inside].astype(np.bool_))(s[inside])
            row[source] = measure(after, y.astype(np.bool_))
    return matrix
