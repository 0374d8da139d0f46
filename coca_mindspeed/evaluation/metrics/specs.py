"""The metrics: how each is named, printed and compared.  The only declaration; every table and picture reads it."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import ROUND_HALF_UP, Decimal

UNDEFINED = "--"


@dataclass(frozen=True, slots=True)
class MetricInfo:
    """One metric as people read it.

    Attributes:
        label: for table headings.
        meaning: one line for the foot of a report.
        better: 1 if higher is better, -1 if lower is, 0 if neither.
        decimals: digits after the point.
        percent: the printed figure is the value in percent.
        upper: the largest possible value; the smallest is 0 for all.
    """

    label: str
    meaning: str
    better: int
    decimals: int = 3
    percent: bool = False
    upper: float = 1.0

    @property
    def scale(self) -> float:
        """The printed figure is the value times this."""
        return 100.0 if self.percent else 1.0

    @property
    def heading(self) -> str:
        """The label with an arrow to where the metric is better."""
        return self.label + {1: " ↑", -1: " ↓", 0: ""}[self.better]


def _share(label: str, meaning: str) -> MetricInfo:
    return MetricInfo(label, meaning, 1, decimals=1, percent=True)


CATALOGUE: Mapping[str, MetricInfo] = {
    "accuracy": _share("accuracy", "share of right answers"),
    "auroc": MetricInfo("AUROC", "chance that a right answer has the higher confidence, ties half", 1),
    "ece": MetricInfo("ECE", "expected calibration error", -1),
    "brier": MetricInfo("Brier", "mean squared error of confidence against correctness", -1),
    "success_rate": _share("SR", "share of responses with a valid confidence"),
    "tokens_to_confidence": MetricInfo("TTC", "tokens until the confidence is known", -1, decimals=1, upper=math.inf),
    "mce": MetricInfo("MCE", "largest calibration gap of a bin", -1),
    "reliability": MetricInfo("REL", "reliability part of Brier", -1),
    "resolution": MetricInfo("RES", "resolution part of Brier", 1),
    "uncertainty": MetricInfo("UNC", "uncertainty part of Brier", 0),
    "log_score": MetricInfo("Log", "mean negative log-likelihood in nats", -1, upper=math.inf),
    "aurc": MetricInfo("AURC", "mean error rate of the most confident, over all coverages", -1),
    "excess_aurc": MetricInfo("E-AURC", "AURC less that of the best ranking of the same answers", -1),
    "smooth_ece": MetricInfo("smECE", "calibration error smoothed by a kernel as wide as the error; no bins", -1),
    "ks": MetricInfo("KS", "largest gap between the running sums of confidence and correctness", -1),
}

# The paper's six, which summaries and comparisons print; the rest is for those who look closer.
HEADLINE_METRICS = ("accuracy", "auroc", "ece", "brier", "success_rate", "tokens_to_confidence")
FURTHER_METRICS = tuple(name for name in CATALOGUE if name not in HEADLINE_METRICS)
# Those that say how good answers and confidences are, whatever they cost.
QUALITY_METRICS = HEADLINE_METRICS[:4]
# Metrics of confidence, over the predictions that state a valid one.
CONFIDENCE_METRICS = tuple(
    name for name in CATALOGUE if name not in ("accuracy", "success_rate", "tokens_to_confidence")
)
# What stands beside every ECE: the value that a calibrated model with the same confidences shows.
CALIBRATED_LABEL = "ECE if calibrated"


def metric_info(name: str) -> MetricInfo:
    """The entry of a metric; ``accuracy_at_0.5`` and its like have one each.

    Raises:
        KeyError: there is no such metric.
    """
    if name.startswith("accuracy_at_"):
        percent = f"{float(name.removeprefix('accuracy_at_')) * 100:g}%"
        return _share(f"accuracy@{percent}", f"accuracy of the most confident {percent}")
    return CATALOGUE[name]


def round_half_up(value: float, decimals: int) -> Decimal:
    """Round as the paper does: halves away from zero, judged on the shortest decimal that is ``value``.

    2.675 gives 2.68, although the nearest float lies a little below; a mean whose error is a few units in the last
    place (0.12499999999999999) is taken for the decimal that it stands for.
    """
    return Decimal(f"{value:.12g}").quantize(Decimal(1).scaleb(-decimals), rounding=ROUND_HALF_UP)


def show(name: str, value: float | None, *, signed: bool = False) -> str:
    """A metric's value as every table prints it; ``--`` where undefined (NaN or None)."""
    if value is None or math.isnan(value):
        return UNDEFINED
    info = metric_info(name)
    return f"{round_half_up(value * info.scale, info.decimals):{'+' if signed else ''}}{'%' if info.percent else ''}"


def show_range(name: str, low: float, high: float, *, signed: bool = False) -> str:
    """The bounds of an interval, ``0.013 to 0.054``; empty where there are none."""
    if math.isnan(low) or math.isnan(high):
        return ""
    return f"{show(name, low, signed=signed)} to {show(name, high, signed=signed)}"


def show_calibrated(mean: float, high: float) -> str:
    """What a calibrated model's ECE would be: its mean, and what 95 in a hundred stay below."""
    if math.isnan(mean):
        return UNDEFINED
    return f"{show('ece', mean)} (95% < {show('ece', high)})"
