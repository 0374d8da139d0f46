"""Intervals of bounded quantities that hold on small sets and at their extremes.

A bootstrap has nothing to vary where all answers are right, and a normal interval has no width there; the exact
binomial interval (Clopper and Pearson, 1934) holds for every share and every count.  For other means of values
between two bounds it serves with an *effective size*: the number of right-or-wrong answers that would vary as much
(Korn and Graubard, 1998, do so for survey samples).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.stats import beta, norm
from scipy.stats import t as student_t

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate between two bounds; NaN where undefined."""

    estimate: float
    low: float
    high: float

    def as_dict(self) -> dict[str, float | None]:
        """Strict JSON, None for NaN."""
        values = {"estimate": self.estimate, "low": self.low, "high": self.high}
        return {name: None if math.isnan(value) else value for name, value in values.items()}


UNDEFINED_INTERVAL = Interval(math.nan, math.nan, math.nan)


def share_low(share: Any, size: Any, tail: float) -> Floats:
    """Exact binomial lower bound of a share observed on ``size`` answers; too high with probability ``tail``.

    Args:
        share: observed, in [0, 1]; arrays are broadcast.
        size: how many answers; need not be whole.
        tail: one-sided.
    """
    right = np.asarray(share, dtype=np.float64) * size
    found = beta.ppf(tail, np.where(right > 0, right, 1.0), size - right + 1)
    return np.where(right > 0, found, 0.0)


def share_high(share: Any, size: Any, tail: float) -> Floats:
    """Exact binomial upper bound of a share; as :func:`share_low`."""
    return 1 - share_low(1 - np.asarray(share, dtype=np.float64), size, tail)


@dataclass(frozen=True, slots=True)
class BoundedMean:
    """An estimated mean of values in [0, 1], or of paired differences in [-1, 1].

    Attributes:
        value: the estimate, NaN where undefined.
        variance: of the estimate, from the spread of the values.
        units: independent questions that it rests on at least: their worst case is a right-or-wrong value each.
        unseen: variance added for values that were not drawn.  One value of the worst kind among u would add 1/u^2;
            without it 30 losses of nearly nothing would promise that none is large.
        most: answers that it rests on where each is right or wrong, so that no variance is smaller; None otherwise.
        lower: 0, or -1 for differences.
    """

    value: float
    variance: float
    units: float
    unseen: float
    most: float | None = None
    lower: float = 0.0

    def interval(self, level: float = 0.95) -> Interval:
        """The exact binomial interval of the effective size, at least ``units`` and at most ``most``."""
        if math.isnan(self.value) or self.units <= 0:
            return Interval(self.value, math.nan, math.nan)
        width = 1 - self.lower
        share = min(1.0, max(0.0, (self.value - self.lower) / width))
        # Two more values at either end, as Agresti and Coull do: the variance of a share of nothing is not nothing.
        smooth = (self.units * share + 2) / (self.units + 4)
        size = smooth * (1 - smooth) / (self.variance / width**2 + self.unseen)
        two_sided = 0.5 + level / 2
        # The variance is estimated: Student's quantiles are wider than the normal's.
        size *= (norm.ppf(two_sided) / student_t.ppf(two_sided, max(self.units - 1, 1))) ** 2
        size = max(size, self.units)
        if self.most is not None:
            size = min(size, self.most)
        tail = (1 - level) / 2
        low, high = share_low(share, size, tail), share_high(share, size, tail)
        return Interval(
            self.value,
            min(self.value, float(self.lower + width * low)),
            max(self.value, float(self.lower + width * high)),
        )


def plain_mean(parts: Sequence[BoundedMean]) -> BoundedMean:
    """The plain mean of estimates from independent data sets, all of which are defined."""
    if len(parts) == 1:
        return parts[0]
    count = len(parts)
    return BoundedMean(
        sum(part.value for part in parts) / count,
        sum(part.variance for part in parts) / count**2,
        count * min(part.units for part in parts),
        sum(part.unseen for part in parts) / count**2,
        lower=parts[0].lower,
    )
