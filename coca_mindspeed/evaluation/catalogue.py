"""How each metric is named, printed and compared."""

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
        scale: the printed figure is the value times this (100 for percent).
        upper: the largest possible value; the smallest is 0 for all.
    """

    label: str
    meaning: str
    better: int
    decimals: int = 2
    scale: float = 1.0
    upper: float = 1.0


CATALOGUE: Mapping[str, MetricInfo] = {
    "accuracy": MetricInfo("Acc", "share of right answers, percent", 1, scale=100),
    "auroc": MetricInfo("AUROC", "chance that a right answer has the higher confidence, ties half", 1),
    "ece": MetricInfo("ECE", "expected calibration error, 10 equal-width bins closed on the right", -1),
    "brier": MetricInfo("Brier", "mean squared error of confidence against correctness", -1),
    "success_rate": MetricInfo("SR", "share of responses with a valid confidence, percent", 1, 1, 100),
    "tokens_to_confidence": MetricInfo("TTC", "tokens until the confidence is known", -1, upper=math.inf),
    "mce": MetricInfo("MCE", "largest calibration gap of a bin", -1),
    "reliability": MetricInfo("REL", "reliability part of Brier", -1, 3),
    "resolution": MetricInfo("RES", "resolution part of Brier", 1, 3),
    "uncertainty": MetricInfo("UNC", "uncertainty part of Brier", 0, 3),
    "log_score": MetricInfo("Log", "mean negative log-likelihood in nats", -1, upper=math.inf),
    "aurc": MetricInfo("AURC", "mean error rate of the most confident, over all coverages", -1),
}


def metric_info(name: str) -> MetricInfo:
    """The entry of a metric; ``accuracy_at_0.5`` and its like have one each.

    Raises:
        KeyError: there is no such metric.
    """
    if name.startswith("accuracy_at_"):
        percent = f"{float(name.removeprefix('accuracy_at_')) * 100:g}%"
        return MetricInfo(f"Acc@{percent}", f"accuracy of the most confident {percent}, percent", 1, scale=100)
    return CATALOGUE[name]


def round_half_up(value: float, decimals: int) -> Decimal:
    """Round as the paper does: halves away from zero, judged on the shortest decimal that is ``value``.

    2.675 gives 2.68, although the nearest float lies a little below; a mean whose error is a few units in the last
    place (0.12499999999999999) is taken for the decimal that it stands for.
    """
    return Decimal(f"{value:.12g}").quantize(Decimal(1).scaleb(-decimals), rounding=ROUND_HALF_UP)


def show(name: str, value: float, *, signed: bool = False) -> str:
    """A metric's value as the tables print it; ``--`` where undefined."""
    if math.isnan(value):
        return UNDEFINED
    info = metric_info(name)
    return f"{round_half_up(value * info.scale, info.decimals):{'+' if signed else ''}}"
