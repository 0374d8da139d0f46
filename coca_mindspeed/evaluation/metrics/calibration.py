"""Calibration and discrimination of stated confidence (method, section 7).

AUROC, ECE, Brier and the other metrics of confidence are over the valid predictions; accuracy and success rate are
over all.  What is undefined is NaN, and :attr:`CalibrationMetrics.undefined` says why; it is never a silent zero.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from coca_mindspeed.evaluation.metrics.binning import BinScheme, BinsClosed
from coca_mindspeed.evaluation.metrics.smooth_ece import smooth_ece
from coca_mindspeed.evaluation.metrics.specs import CATALOGUE, HEADLINE_METRICS
from coca_mindspeed.evaluation.metrics.weighted import MetricOptions, WeightedSample, coverage_name

HEADLINE = (*HEADLINE_METRICS, "n")


@dataclass(frozen=True, slots=True)
class CalibrationMetrics:
    """What is known about one set of predictions; NaN where undefined.

    Attributes:
        n: predictions.
        n_valid: those with a valid confidence.
        accuracy: share of right answers, over all.
        success_rate: n_valid / n (SR).
        tokens_to_confidence: mean over the predictions where it is known (TTC), in tokens.
        auroc: probability that a right answer has the higher confidence than a wrong one, ties counted half.
        ece: expected calibration error: mean over bins of |mean confidence - accuracy|, weighted by count.
        mce: the largest such gap of a bin.
        brier: mean of (confidence - correct)^2 = reliability - resolution + uncertainty.
        reliability: Murphy's decomposition, predictions grouped by confidence value; lower is better.
        resolution: higher is better.
        uncertainty: accuracy * (1 - accuracy) of the valid ones; not the model's merit.
        log_score: mean negative log-likelihood of the verdicts, in nats.
        aurc: area under the risk-coverage curve: mean error rate of the k most confident, over k = 1 to n_valid.
        excess_aurc: E-AURC: ``aurc`` less that of the best ranking of the same answers, every right one first.
        smooth_ece: see :func:`.smooth_ece.smooth_ece`.
        ks: largest gap between the running sums of confidence and of correctness, by confidence, as a share of n_valid
            (Gupta et al., 2021).
        selective_accuracy: coverage -> accuracy of that share of most confident answers.
        undefined: metric -> why it is NaN.
    """

    n: int
    n_valid: int
    accuracy: float
    success_rate: float
    tokens_to_confidence: float
    auroc: float
    ece: float
    mce: float
    brier: float
    reliability: float
    resolution: float
    uncertainty: float
    log_score: float
    aurc: float
    excess_aurc: float
    smooth_ece: float
    ks: float
    selective_accuracy: Mapping[float, float]
    undefined: Mapping[str, str]

    def values(self) -> dict[str, float]:
        """Every metric by name, NaN where undefined; selective accuracy as ``accuracy_at_0.5``."""
        selective = {coverage_name(c): value for c, value in self.selective_accuracy.items()}
        return {name: getattr(self, name) for name in CATALOGUE} | selective

    def as_dict(self) -> dict[str, Any]:
        """Strict JSON: every metric with None for NaN, ``n``, ``n_valid`` and the reasons under ``undefined``."""
        values = {name: None if math.isnan(value) else value for name, value in self.values().items()}
        return {**values, "n": self.n, "n_valid": self.n_valid, "undefined": dict(self.undefined)}

    def headline(self) -> dict[str, Any]:
        """The seven numbers that summaries print: :data:`HEADLINE`, None for NaN."""
        values = self.as_dict()
        return {name: values[name] for name in HEADLINE}


def _reasons(values: Mapping[str, float], sample: WeightedSample) -> dict[str, str]:
    if sample.n == 0:
        reason = dict.fromkeys(values, "there are no predictions")
    elif sample.n_valid == 0:
        reason = dict.fromkeys(values, "no response has a valid confidence")
    else:
        all_right = bool(sample.correct[: sample.n_valid].all())
        reason = {"auroc": f"all answers with a valid confidence are {'right' if all_right else 'wrong'}"}
    if sample.n:
        reason["tokens_to_confidence"] = "no prediction says after how many tokens its confidence was known"
    return {name: reason[name] for name, value in values.items() if math.isnan(value)}


def calibration_metrics(
    confidence: npt.NDArray[Any],
    correct: npt.NDArray[np.bool_],
    tokens_to_confidence: npt.NDArray[Any] | None = None,
    *,
    bins: int = 10,
    scheme: BinScheme = "equal_width",
    closed: BinsClosed = "right",
    debias: bool = False,
    coverages: tuple[float, ...] = (0.25, 0.5, 0.75),
) -> CalibrationMetrics:
    """All metrics of n predictions.

    Args:
        confidence: float64 (n,) in [0, 1], NaN where the response states no valid confidence.  float32 is binned
            by the float32 nearest to each edge, so that 0.3 means 0.3 there too.
        correct: bool (n,).
        tokens_to_confidence: (n,), NaN where unknown; None where nobody counted.
        bins: of ECE and MCE.
        scheme: ``equal_width`` (the paper's tables) or ``equal_mass``.
        closed: see :class:`MetricOptions`.
        debias: see :class:`MetricOptions`.
        coverages: see :class:`MetricOptions`.

    Raises:
        ValueError: lengths differ, or a confidence lies outside [0, 1].
        TypeError: a dtype is wrong.
    """
    options = MetricOptions(bins=bins, scheme=scheme, closed=closed, debias=debias, coverages=coverages)
    return metrics_of(WeightedSample(confidence, correct, tokens_to_confidence, options))


def metrics_of(sample: WeightedSample) -> CalibrationMetrics:
    """All metrics of a prepared sample, every prediction with weight one."""
    values = {name: float(value[0]) for name, value in sample.metrics(np.ones((1, sample.n))).items()}
    values["smooth_ece"] = smooth_ece(sample.values, sample.group_counts, sample.group_right())
    selective = {coverage: values.pop(coverage_name(coverage)) for coverage in sample.options.coverages}
    named = values | {coverage_name(c): value for c, value in selective.items()}
    return CalibrationMetrics(
        n=sample.n, n_valid=sample.n_valid, **values, selective_accuracy=selective, undefined=_reasons(named, sample)
    )
