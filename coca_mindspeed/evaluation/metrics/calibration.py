"""Calibration and discrimination of stated confidence (method, section 7).

AUROC, ECE, Brier and the other metrics of confidence are over the valid predictions; accuracy and success rate are
over all.  Undefined values are NaN, and :attr:`CalibrationMetrics.undefined` gives the reason.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from coca_mindspeed.evaluation.metrics.binning import Floats
from coca_mindspeed.evaluation.metrics.specs import HEADLINE_METRICS, METRIC_SPECS
from coca_mindspeed.evaluation.metrics.weighted import MetricOptions, WeightedSample, coverage_name
from coca_mindspeed.evaluation.predictions import READINGS, Prediction, outcomes, read_as

HEADLINE = (*HEADLINE_METRICS, "n")


@dataclass(frozen=True, slots=True)
class CalibrationMetrics:
    """Metrics of one set of predictions.

    Attributes:
        n: number of predictions.
        n_valid: number of predictions with a valid confidence.
        values: the metrics of :data:`.specs.METRIC_SPECS`, and selective accuracy as ``accuracy_at_0.5``; NaN where
            undefined.
        undefined: the reason for each NaN.
    """

    n: int
    n_valid: int
    values: Mapping[str, float]
    undefined: Mapping[str, str]

    def as_dict(self) -> dict[str, Any]:
        """Return strict JSON: every metric (None for NaN), ``n``, ``n_valid`` and ``undefined``."""
        values = {name: None if math.isnan(value) else value for name, value in self.values.items()}
        return {**values, "n": self.n, "n_valid": self.n_valid, "undefined": dict(self.undefined)}

    def headline(self) -> dict[str, Any]:
        """Return the metrics of :data:`HEADLINE`, None for NaN."""
        values = self.as_dict()
        return {name: values[name] for name in HEADLINE}


def _reasons(values: Mapping[str, float], sample: WeightedSample) -> dict[str, str]:
    if sample.n == 0:
        reason = dict.fromkeys(values, "there are no predictions")
    elif sample.n_valid == 0:
        reason = dict.fromkeys(values, "no response has a valid confidence")
    else:
        all_right = bool(sample.correct[: sample.n_valid].all())
        reason = {"auroc": f"all answers with a valid confidence are {'correct' if all_right else 'wrong'}"}
    if sample.n:
        reason["tokens_to_confidence"] = "no prediction has tokens_to_confidence"
    return {name: reason[name] for name, value in values.items() if math.isnan(value)}


def calibration_metrics(
    confidence: npt.NDArray[Any],
    correct: npt.NDArray[np.bool_],
    tokens_to_confidence: npt.NDArray[Any] | None = None,
    options: MetricOptions | None = None,
) -> CalibrationMetrics:
    """Compute all metrics of n predictions.

    Args:
        confidence: float64 (n,) in [0, 1], NaN where invalid.  float32 is binned by the float32 nearest to each edge.
        correct: bool (n,).
        tokens_to_confidence: (n,), NaN where unknown.

    Raises:
        ValueError: lengths differ, or a confidence lies outside [0, 1].
        TypeError: a dtype is wrong.
    """
    return metrics_of(WeightedSample(confidence, correct, tokens_to_confidence, options or MetricOptions()))


def metrics_of(sample: WeightedSample) -> CalibrationMetrics:
    """Compute all metrics of a prepared sample with equal weights."""
    found = {name: float(value[0]) for name, value in sample.metrics(np.ones((1, sample.n))).items()}
    found["smooth_ece"] = smooth_ece(sample.values, sample.group_counts, sample.group_right())
    values = {name: found[name] for name in (*METRIC_SPECS, *map(coverage_name, sample.options.coverages))}
    return CalibrationMetrics(sample.n, sample.n_valid, values, _reasons(values, sample))


_SMOOTH_GRID = 1000  # cells of [0, 1]


def smooth_ece(values: Floats, counts: Floats, right: Floats) -> float:
    """Calibration error without bins (Blasiok and Nakkiran, 2023); NaN without valid answers.

    The residuals are smoothed by a Gaussian kernel reflected at 0 and 1, whose width equals the resulting error.

    Args:
        values: distinct confidences (g,).
        counts: answers with each (g,).
        right: correct answers among them (g,).
    """
    if not len(values):
        return float("nan")
    places = np.minimum((values * _SMOOTH_GRID).astype(np.intp), _SMOOTH_GRID - 1)
    residual = np.bincount(places, weights=right - values * counts, minlength=_SMOOTH_GRID) / counts.sum()
    # Reflected at both ends, a function on [0, 1] has period 2; smoothing damps each of its frequencies f = k / 2.
    spectrum = np.fft.rfft(np.concatenate([residual, residual[::-1]]))
    decay = -((np.pi * np.arange(len(spectrum))) ** 2) / 2

    def smoothed(width: float) -> float:
        damped = np.fft.irfft(spectrum * np.exp(decay * width**2), 2 * _SMOOTH_GRID)
        return float(np.abs(damped[:_SMOOTH_GRID]).sum())

    low, high = 1e-3, 1.0
    for _ in range(20):  # the error falls as the width grows, so the two meet once
        width = (low + high) / 2
        low, high = (width, high) if smoothed(width) > width else (low, width)
    return smoothed((low + high) / 2)


def reading_metrics(predictions: Sequence[Prediction]) -> dict[str, dict[str, float]]:
    """AUROC, ECE and Brier of each reading of the confidences; NaN where it is not known."""
    found = {}
    for reading in READINGS:
        data = outcomes(read_as(predictions, reading))
        values = calibration_metrics(data.confidence, data.correct).values
        found[reading] = {name: values[name] for name in ("auroc", "ece", "brier")}
    return found
