"""Metric specs: name, format and direction of each metric.  Every table and plot reads them."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import ROUND_HALF_UP, Decimal

UNDEFINED = "--"


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """How a metric is printed and compared; ``better`` is 1 if higher is better, -1 if lower is, 0 otherwise.

    ``meaning`` is one line for the foot of a report; ``upper`` is the largest possible value, the smallest is 0.
    """

    label: str
    meaning: str
    better: int
    decimals: int = 3
    percent: bool = False
    upper: float = 1.0

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


METRIC_SPECS: Mapping[str, MetricSpec] = {
    "accuracy": _share("accuracy", "fraction of correct answers"),
    "auroc": MetricSpec("AUROC", "probability that a correct answer has a higher confidence than a wrong one", 1),
    "ece": MetricSpec(
        "ECE", "expected calibration error: mean gap between confidence and accuracy over bins of confidence", -1
    ),
    "brier": MetricSpec("Brier", "mean squared error of confidence against correctness", -1),
    "success_rate": _share("SR", "fraction of responses with a valid confidence"),
    "tokens_to_confidence": MetricSpec("TTC", "tokens until the confidence is known", -1, decimals=1, upper=math.inf),
    "mce": MetricSpec("MCE", "largest calibration gap of a bin", -1),
    # Murphy's decomposition, predictions grouped by confidence value: Brier = REL - RES + UNC.
    "reliability": MetricSpec("REL", "reliability part of Brier", -1),
    "resolution": MetricSpec("RES", "resolution part of Brier", 1),
    "uncertainty": MetricSpec("UNC", "uncertainty part of Brier", 0),
    "log_score": MetricSpec("Log", "mean negative log-likelihood in nats", -1, upper=math.inf),
    "aurc": MetricSpec("AURC", "mean error rate of the k most confident, over all k", -1),
    "excess_aurc": MetricSpec("E-AURC", "AURC minus that of the best ranking of the same answers", -1),
    "smooth_ece": MetricSpec("smECE", "smooth calibration error, without bins", -1),
    "ks": MetricSpec("KS", "largest gap between the running sums of confidence and correctness", -1),
}

# The paper's six, printed by summaries and comparisons.
HEADLINE_METRICS = ("accuracy", "auroc", "ece", "brier", "success_rate", "tokens_to_confidence")
FURTHER_METRICS = tuple(name for name in METRIC_SPECS if name not in HEADLINE_METRICS)
# Quality without cost.
QUALITY_METRICS = HEADLINE_METRICS[:4]
# Metrics of confidence, over the predictions that state a valid one.
CONFIDENCE_METRICS = tuple(
    name for name in METRIC_SPECS if name not in ("accuracy", "success_rate", "tokens_to_confidence")
)
# Printed next to every ECE.
UNDER_CALIBRATION_LABEL = "ECE if calibrated"


def metric_spec(name: str) -> MetricSpec:
    """Return the spec of a metric, also of ``accuracy_at_0.5`` and the like; raises KeyError for unknown names."""
    if name.startswith("accuracy_at_"):
        percent = f"{float(name.removeprefix('accuracy_at_')) * 100:g}%"
        return _share(f"accuracy@{percent}", f"accuracy of the most confident {percent}")
    return METRIC_SPECS[name]


def round_half_up(value: float, decimals: int) -> Decimal:
    """Round halves away from zero, as the paper does, judged on the shortest decimal of ``value``.

    2.675 gives 2.68, although the nearest float is slightly smaller; 0.12499999999999999 counts as 0.125.
    """
    return Decimal(f"{value:.12g}").quantize(Decimal(1).scaleb(-decimals), rounding=ROUND_HALF_UP)


def show(name: str, value: float | None, *, signed: bool = False) -> str:
    """Format a metric's value for tables; ``--`` if undefined (NaN or None)."""
    if value is None or math.isnan(value):
        return UNDEFINED
    info = metric_spec(name)
    return f"{round_half_up(value * info.scale, info.decimals):{'+' if signed else ''}}{'%' if info.percent else ''}"


def show_range(name: str, low: float, high: float, *, signed: bool = False) -> str:
    """Format the bounds of an interval, ``0.013 to 0.054``; empty if there are none."""
    if math.isnan(low) or math.isnan(high):
        return ""
    return f"{show(name, low, signed=signed)} to {show(name, high, signed=signed)}"


def show_under_calibration(mean: float, high: float) -> str:
    """Format the mean and the 95% quantile of the ECE under perfect calibration."""
    if math.isnan(mean):
        return UNDEFINED
    return f"{show('ece', mean)} (95% < {show('ece', high)})"
