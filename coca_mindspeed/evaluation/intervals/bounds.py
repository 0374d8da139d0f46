"""Intervals of bounded quantities that hold for small sets and at the extremes.

A bootstrap has no variation where all answers are correct, and a normal interval has no width there.  The exact
binomial interval (Clopper and Pearson, 1934) holds for every proportion and count.  Other means of values in a bounded
range use it with an *effective size*: the number of binary answers of the same variance (Korn and Graubard, 1998).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.special import betaincinv, ndtri, stdtrit

from coca_mindspeed.evaluation.metrics.binning import Floats


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate with two bounds; NaN where undefined."""

    estimate: float
    low: float
    high: float

    def as_dict(self) -> dict[str, float | None]:
        """Return strict JSON, None for NaN."""
        values = {"estimate": self.estimate, "low": self.low, "high": self.high}
        return {name: None if math.isnan(value) else value for name, value in values.items()}


UNDEFINED_INTERVAL = Interval(math.nan, math.nan, math.nan)


def share_low(share: Any, size: Any, tail: float) -> Floats:
    """Exact binomial lower bound of a proportion; it exceeds the true value with probability at most ``tail``.

    Arrays are broadcast; ``size``, the number of answers, need not be whole.
    """
    right = np.asarray(share, dtype=np.float64) * size
    found = betaincinv(np.where(right > 0, right, 1.0), size - right + 1, tail)
    return np.where(right > 0, found, 0.0)


def share_high(share: Any, size: Any, tail: float) -> Floats:
    """Exact binomial upper bound of a proportion; as :func:`share_low`."""
    return 1 - share_low(1 - np.asarray(share, dtype=np.float64), size, tail)


@dataclass(frozen=True, slots=True)
class BoundedMean:
    """An estimated mean of values in [0, 1], or of paired differences in [-1, 1] (``lower`` -1).

    Attributes:
        units: number of independent questions.
        most: number of answers if each is binary, which bounds the effective size; None otherwise.
        is_mean: the variance is at most that of ``units`` binary values.  False for functions of ranked answers (AURC,
            selective accuracy), where one answer can move many.
    """

    value: float
    variance: float
    units: float
    most: float | None = None
    lower: float = 0.0
    is_mean: bool = True

    def interval(self, level: float = 0.95) -> Interval:
        """Exact binomial interval of the effective size, at most ``most`` and, for means, at least ``units``.

        Without ``is_mean`` it is at least as wide as the normal interval on both sides: near 0 and 1 the binomial
        interval assumes a variance that shrinks with the value, which need not hold for ranked answers.
        """
        if math.isnan(self.value) or self.units <= 0:
            return Interval(self.value, math.nan, math.nan)
        width = 1 - self.lower
        share = min(1.0, max(0.0, (self.value - self.lower) / width))
        size, deviation = self._effective(share, width)
        normal = float(ndtri(0.5 + level / 2))
        if self.is_mean:
            # The variance is estimated: Student's quantiles are wider than the normal's.
            size *= (normal / stdtrit(max(self.units - 1, 1), 0.5 + level / 2)) ** 2
            size = max(size, self.units)
        if self.most is not None:
            size = min(size, self.most)
        tail = (1 - level) / 2
        low, high = float(share_low(share, size, tail)), float(share_high(share, size, tail))
        if not self.is_mean:
            low, high = max(0.0, min(low, share - normal * deviation)), min(1.0, max(high, share + normal * deviation))
        return Interval(
            self.value, min(self.value, self.lower + width * low), max(self.value, self.lower + width * high)
        )

    def _effective(self, share: float, width: float) -> tuple[float, float]:
        """Effective size and standard deviation of the estimate, on the scale of ``share``.

        Both include two added values at either end (Agresti and Coull, 1998), since equal values do not prove that no
        value differs.
        """
        smooth = (self.units * share + 2) / (self.units + 4)
        spread = self.units * self.variance / width**2 + (share - smooth) ** 2
        variance = self.units * spread + 2 * smooth**2 + 2 * (1 - smooth) ** 2
        # A mean's size has a floor, so that its variance need not be shared out over the added values too.
        variance /= self.units if self.is_mean else self.units + 4
        return self.units * smooth * (1 - smooth) / variance, math.sqrt(variance / self.units)


def plain_mean(parts: Sequence[BoundedMean]) -> BoundedMean:
    """Return the plain mean of defined estimates from independent data sets."""
    if len(parts) == 1:
        return parts[0]
    count = len(parts)
    return BoundedMean(
        sum(part.value for part in parts) / count,
        sum(part.variance for part in parts) / count**2,
        count * min(part.units for part in parts),
        lower=parts[0].lower,
        is_mean=parts[0].is_mean,
    )


def shifted_percentiles(estimate: float, values: Floats, level: float = 0.95, lower: float = -math.inf) -> Interval:
    """Return percentiles of the replicates, shifted so that their mean is the estimate, and at least ``lower``.

    Not valid for ECE: its estimate exceeds the true error by about as much as its replicates exceed the estimate.
    ``values`` are replicates (r,); NaN is left out.
    """
    known = values[~np.isnan(values)]
    if math.isnan(estimate) or not len(known):
        return Interval(estimate, math.nan, math.nan)
    tail = (1 - level) / 2
    low, high = np.quantile(known, [tail, 1 - tail]) + (estimate - known.mean())
    return Interval(estimate, float(np.clip(low, lower, estimate)), max(float(high), estimate))
