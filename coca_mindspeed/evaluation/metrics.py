"""Metrics of predictions: their names and formats, and their values (method, section 7).

Accuracy and success rate are over all predictions, the metrics of confidence over those with a valid one.  Undefined
values are NaN, and :attr:`CalibrationMetrics.undefined` gives the reason.  :mod:`.intervals` has their intervals.

Equal-width bins are closed on the right, the first also on the left: [0, 0.1], (0.1, 0.2], ..., (0.9, 1].  Closed on
the left they are [0, 0.1), ..., [0.8, 0.9), [0.9, 1].  Each edge is the float nearest to the exact decimal, so that a
confidence written "0.3" lies in (0.2, 0.3] or in [0.3, 0.4).  ``numpy.linspace(0, 1, 11)`` does not have this
property: its fourth edge is 0.30000000000000004.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import ROUND_HALF_UP, Decimal
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.special import betaincinv

from coca_mindspeed.evaluation.predictions import Prediction, outcomes
from coca_mindspeed.utils.json_files import replace_nonfinite

Floats = npt.NDArray[np.float64]
BinsClosed = Literal["right", "left"]

#: With fewer labels, a confidence is not shown to be usable.
FEWEST_LABELS = 100


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


def bin_edges(dtype: npt.DTypeLike = np.float64, bins: int = 10) -> npt.NDArray[Any]:
    """Return the ``[bins + 1]`` edges of equal-width bins from 0 to 1, in the dtype of the confidences."""
    if bins < 1:
        raise ValueError(f"bins should be at least 1, found {bins}")
    # k / bins is the correctly rounded quotient, in other words the float nearest to the exact edge.
    return (np.arange(bins + 1) / bins).astype(dtype)


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


UNDEFINED = "--"


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """How a metric is printed and compared; its smallest value is 0."""

    label: str
    meaning: str  # one line for the foot of a report
    better: int  # 1 if higher is better, -1 if lower is, 0 otherwise
    decimals: int = 3
    percent: bool = False

    @property
    def scale(self) -> float:
        """Factor from the value to the printed figure."""
        return 100.0 if self.percent else 1.0

    @property
    def heading(self) -> str:
        """The label with an arrow in the better direction."""
        return self.label + {1: " ↑", -1: " ↓", 0: ""}[self.better]


def _share(label: str, meaning: str) -> MetricSpec:
    return MetricSpec(label, meaning, 1, decimals=1, percent=True)


#: Metric -> the fraction of most confident answers that it is the accuracy of.
COVERAGES: Mapping[str, float] = {f"accuracy_at_{share:g}": share for share in (0.25, 0.5, 0.75)}
METRIC_SPECS: Mapping[str, MetricSpec] = {
    "accuracy": _share("accuracy", "fraction of correct answers"),
    "auroc": MetricSpec("AUROC", "probability that a correct answer has a higher confidence than a wrong one", 1),
    "ece": MetricSpec(
        "ECE", "expected calibration error: mean gap between confidence and accuracy over bins of confidence", -1
    ),
    "brier": MetricSpec("Brier", "mean squared error of confidence against correctness", -1),
    "success_rate": _share("SR", "fraction of responses with a valid confidence"),
    "tokens_to_confidence": MetricSpec("TTC", "tokens until the confidence is known", -1, decimals=1),
    "mce": MetricSpec("MCE", "largest calibration gap of a bin", -1),
    "pce": MetricSpec(
        "PCE", "over-confident part of ECE: gaps of the bins whose confidence is above their accuracy", -1
    ),
    "wrong_confidence": MetricSpec("wrong at", "mean confidence of wrong answers", -1),
    # Murphy's decomposition, predictions grouped by confidence value: Brier = REL - RES + UNC.
    "reliability": MetricSpec("REL", "reliability part of Brier", -1),
    "resolution": MetricSpec("RES", "resolution part of Brier", 1),
    "uncertainty": MetricSpec("UNC", "uncertainty part of Brier", 0),
    "log_score": MetricSpec("Log", "mean negative log-likelihood in nats", -1),
    "aurc": MetricSpec("AURC", "mean error rate of the k most confident, over all k", -1),
    **{
        name: _share(f"accuracy@{share:.0%}", f"accuracy of the most confident {share:.0%}")
        for name, share in COVERAGES.items()
    },
}
# The paper's six, printed by summaries and comparisons.
HEADLINE_METRICS = ("accuracy", "auroc", "ece", "brier", "success_rate", "tokens_to_confidence")
FURTHER_METRICS = tuple(name for name in METRIC_SPECS if name not in HEADLINE_METRICS)
HEADLINE = (*HEADLINE_METRICS, "n")
QUALITY_METRICS = HEADLINE_METRICS[:4]  # without cost
# Printed next to every ECE.
UNDER_CALIBRATION_LABEL = "ECE if calibrated"


def round_half_up(value: float, decimals: int) -> Decimal:
    """Round halves away from zero, as the paper does, judged on the shortest decimal of ``value``.

    2.675 gives 2.68, although the nearest float is slightly smaller; 0.12499999999999999 counts as 0.125.
    """
    return Decimal(f"{value:.12g}").quantize(Decimal(1).scaleb(-decimals), rounding=ROUND_HALF_UP)


def show(name: str, value: float | None, *, signed: bool = False) -> str:
    """Format a metric's value for tables; ``--`` if undefined (NaN or None)."""
    if value is None or math.isnan(value):
        return UNDEFINED
    spec = METRIC_SPECS[name]
    return f"{round_half_up(value * spec.scale, spec.decimals):{'+' if signed else ''}}{'%' if spec.percent else ''}"


def show_range(name: str, low: float, high: float, *, signed: bool = False) -> str:
    """Format the bounds of an interval, ``0.013 to 0.054``; empty if there are none."""
    if math.isnan(low) or math.isnan(high):
        return ""
    return f"{show(name, low, signed=signed)} to {show(name, high, signed=signed)}"


def show_under_calibration(mean: float, high: float) -> str:
    """Format the mean and the 95% quantile of the ECE under perfect calibration."""
    return UNDEFINED if math.isnan(mean) else f"{show('ece', mean)} (95% < {show('ece', high)})"


@dataclass(frozen=True, slots=True)
class MetricOptions:
    """Number of the bins of ECE and MCE, and the side on which a bin includes its edge."""

    bins: int = 10
    closed: BinsClosed = "right"

    @property
    def bins_text(self) -> str:
        """The bins as named in tables."""
        return f"{self.bins} equal-width bins closed on the {self.closed}"


DEFAULT_OPTIONS = MetricOptions()


@dataclass(frozen=True, slots=True)
class ConfidenceGroups:
    """The valid predictions grouped by confidence, in descending order."""

    values: Floats  # distinct confidences, [G]
    count: Floats  # answers with each, [G]
    right: Floats  # correct answers with each, [G]
    bin_starts: npt.NDArray[np.intp]  # index of the first group of each non-empty bin, [bins]

    @classmethod
    def of(
        cls, confidence: npt.NDArray[Any], correct: npt.NDArray[np.bool_], options: MetricOptions = DEFAULT_OPTIONS
    ) -> "ConfidenceGroups":
        """Group predictions; float32 confidences are binned by the float32 nearest to each edge."""
        check_confidence(confidence)
        valid = ~np.isnan(confidence)
        negated, group = np.unique(-confidence[valid], return_inverse=True)
        count = np.bincount(group, minlength=len(negated)).astype(np.float64)
        right = np.bincount(group, weights=correct[valid], minlength=len(negated)).astype(np.float64)
        edges = bin_edges(confidence.dtype, options.bins)
        starts = np.flatnonzero(np.diff(bin_index(-negated, edges, options.closed), prepend=-1))
        return cls((-negated).astype(np.float64), count, right, starts)

    def bin_sums(self) -> tuple[Floats, Floats, Floats]:
        """Answers, correct answers and sum of confidences of each non-empty bin, ``[bins]`` each."""
        if not len(self.values):
            return self.count, self.right, self.values
        count, right, stated = (
            np.add.reduceat(sums, self.bin_starts) for sums in (self.count, self.right, self.count * self.values)
        )
        return count, right, stated


def risk_coverage(confidence: npt.NDArray[Any], correct: npt.NDArray[np.bool_]) -> tuple[Floats, Floats]:
    """Return coverage of the valid answers, ascending, and the error rate of the accepted ones, ``[G]`` each."""
    groups = ConfidenceGroups.of(confidence, correct)
    accepted = np.cumsum(groups.count)
    return accepted / accepted[-1:], 1 - np.cumsum(groups.right) / accepted


def suggested_threshold(confidence: npt.NDArray[Any], correct: npt.NDArray[np.bool_]) -> RiskRow | None:
    """Return the threshold above which right answers exceed wrong ones by most; None where they never do.

    Accepting from there on and rejecting below is right for most of these answers; it certifies no error.  Of equal
    thresholds it is the highest.
    """
    groups = ConfidenceGroups.of(confidence, correct)
    excess = np.cumsum(2 * groups.right - groups.count)
    if not (excess > 0).any():
        return None
    return risk_table(confidence, correct, [groups.values[np.argmax(excess)]])[0]


@dataclass(frozen=True, slots=True)
class CalibrationMetrics:
    """Metrics of one set of predictions."""

    n: int  # predictions
    n_valid: int  # of them with a valid confidence
    values: Mapping[str, float]  # the metrics of METRIC_SPECS; NaN where undefined
    undefined: Mapping[str, str]  # the reason for each NaN

    def as_dict(self) -> dict[str, Any]:
        """Return strict JSON: every metric (None for NaN), ``n``, ``n_valid`` and ``undefined``."""
        return {
            **replace_nonfinite(self.values),
            "n": self.n,
            "n_valid": self.n_valid,
            "undefined": dict(self.undefined),
        }

    def headline(self) -> dict[str, Any]:
        """Return the metrics of :data:`HEADLINE`, None for NaN."""
        values = self.as_dict()
        return {name: values[name] for name in HEADLINE}


def calibration_metrics(
    confidence: npt.NDArray[Any],
    correct: npt.NDArray[np.bool_],
    tokens_to_confidence: npt.NDArray[Any] | None = None,
    options: MetricOptions = DEFAULT_OPTIONS,
) -> CalibrationMetrics:
    """Compute all metrics of n predictions.

    Args:
        confidence: float64 or float32 ``[n]`` in [0, 1], NaN where invalid.
        correct: bool ``[n]``.
        tokens_to_confidence: ``[n]``, NaN where unknown.

    Raises:
        ValueError: lengths differ, or a confidence lies outside [0, 1].
        TypeError: a dtype is wrong.
    """
    if correct.dtype != np.bool_:
        raise TypeError(f"correct should be bool, found {correct.dtype}")
    tokens = np.full(len(correct), np.nan) if tokens_to_confidence is None else tokens_to_confidence
    if not confidence.shape == correct.shape == tokens.shape:
        raise ValueError(f"arrays should have one length, found {confidence.shape}, {correct.shape}, {tokens.shape}")
    n, groups = len(correct), ConfidenceGroups.of(confidence, correct, options)
    n_valid, known = int(groups.count.sum()), tokens[~np.isnan(tokens)]
    values = dict.fromkeys(METRIC_SPECS, math.nan)
    if n:
        values |= {"accuracy": float(correct.sum() / n), "success_rate": n_valid / n}
    if len(known):
        values["tokens_to_confidence"] = float(known.sum(dtype=np.float64) / len(known))
    if n_valid:
        values |= _confidence_metrics(groups)
    reasons = {name: _reason(name, n, groups) for name, value in values.items() if math.isnan(value)}
    return CalibrationMetrics(n, n_valid, values, reasons)


def _reason(name: str, n: int, groups: ConfidenceGroups) -> str:
    """Why a metric is undefined."""
    if n == 0:
        return "there are no predictions"
    if name == "tokens_to_confidence":
        return "no prediction has tokens_to_confidence"
    if not len(groups.values):
        return "no response has a valid confidence"
    return f"all answers with a valid confidence are {'correct' if groups.right.any() else 'wrong'}"


def _dot(left: Floats, right: Floats) -> np.float64:
    """Inner product, without the threads that BLAS would start."""
    return np.float64(np.einsum("n,n->", left, right))


_LOG_EPSILON = 1e-6  # confidences are clipped by it in the log score, else infinite for a wrong answer of confidence 1


def _confidence_metrics(groups: ConfidenceGroups) -> dict[str, float]:
    """The metrics of confidence, of at least one valid prediction."""
    values, count, right = groups.values, groups.count, groups.right
    wrong, frequency = count - right, right / count
    accepted, accepted_right = np.cumsum(count), np.cumsum(right)
    n, n_right = accepted[-1], accepted_right[-1]
    # Pairs in which the wrong answer ranks above the correct one; within a group, half of the pairs.
    misranked = _dot(right, accepted) - _dot(right, accepted_right) - _dot(right, wrong) / 2
    with np.errstate(invalid="ignore"):
        metrics = {
            "auroc": 1 - misranked / (n_right * (n - n_right)),
            "wrong_confidence": _dot(wrong, values) / (n - n_right),
        }
    squares = _dot(count, values**2) - 2 * _dot(right, values)  # sum of s^2 - 2 s y
    grouped, base_rate = _dot(right, frequency), n_right / n
    metrics |= {
        "brier": (squares + n_right) / n,
        "reliability": (squares + grouped) / n,
        "resolution": grouped / n - base_rate**2,
        "uncertainty": base_rate * (1 - base_rate),
    }
    clipped = np.clip(values, _LOG_EPSILON, 1 - _LOG_EPSILON)
    metrics["log_score"] = (_dot(right, -np.log(clipped)) + _dot(wrong, -np.log1p(-clipped))) / n
    # A correct answer at place j is accepted for every k >= j, so it adds 1/j + ... + 1/n = H_n - H_(j-1) to the sum of
    # the accuracies of the k most confident.  In a group that fills places a+1 to b, in random order, the sum of
    # H_(j-1) over its places is S_b - S_a with S_b = b H_b - b, and the fraction f of them is correct.
    harmonic = np.concatenate([[0.0], np.cumsum(1 / np.arange(1, int(n) + 1))])
    sums = np.diff(accepted * (harmonic[accepted.astype(np.intp)] - 1), prepend=0.0)
    metrics["aurc"] = 1 - (harmonic[-1] * n_right - _dot(frequency, sums)) / n
    for name, coverage in COVERAGES.items():
        places = places_of(coverage, n)
        metrics[name] = np.interp(places, [0, *accepted], [0, *accepted_right]) / places
    count, right, stated = groups.bin_sums()
    over = stated / count - right / count
    gap = np.abs(over)
    metrics |= {"ece": _dot(count, gap) / n, "mce": gap.max(), "pce": _dot(count, np.maximum(over, 0)) / n}
    return {name: float(value) for name, value in metrics.items()}


def places_of(coverage: float, n: float) -> int:
    """Number of the most confident of n answers at a coverage; rounded, since 0.29 * 100 is 28.999999999999996."""
    return math.ceil(round(coverage * n, 9))


def second_metrics(predictions: Sequence[Prediction]) -> dict[str, float] | None:
    """AUROC, ECE, Brier and success rate of the confidences after the answers; None if no prediction states one."""
    if all(p.confidence_after is None for p in predictions):
        return None
    data = outcomes(replace(p, confidence=p.confidence_after) for p in predictions)
    values = calibration_metrics(data.confidence, data.correct).values
    return {name: values[name] for name in ("auroc", "ece", "brier", "success_rate")}
