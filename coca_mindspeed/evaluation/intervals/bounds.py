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
        units: independent questions that it rests on.
        most: answers that it rests on where each is right or wrong, so that no variance is smaller; None otherwise.
        lower: 0, or -1 for differences.
        is_mean: whether no variance is larger than that of ``units`` right-or-wrong values.  False for functions of
            ranked answers (AURC, selective accuracy), where one answer can move many.
    """

    value: float
    variance: float
    units: float
    most: float | None = None
    lower: float = 0.0
    is_mean: bool = True

    def interval(self, level: float = 0.95) -> Interval:
        """The exact binomial interval of the effective size, at most ``most`` and for means at least ``units``.

        Without ``is_mean`` it is not narrower than the normal interval on either side: near 0 and 1 the binomial one
        presumes a variance that shrinks with the value, and that of ranked answers need not.
        """
        if math.isnan(self.value) or self.units <= 0:
            return Interval(self.value, math.nan, math.nan)
        width = 1 - self.lower
        share = min(1.0, max(0.0, (self.value - self.lower) / width))
        size, deviation = self._effective(share, width)
        normal = float(norm.ppf(0.5 + level / 2))
        if self.is_mean:
            # The variance is estimated: Student's quantiles are wider than the normal's.
            size *= (normal / student_t.ppf(0.5 + level / 2, max(self.units - 1, 1))) ** 2
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
        """How many right-or-wrong values would vary as much, and the estimate's deviation, on the scale of ``share``.

        Both are those of the values and two more at either end, as Agresti and Coull (1998) add them: values that are
        all equal do not promise that none is different.
        """
        smooth = (self.units * share + 2) / (self.units + 4)
        spread = self.units * self.variance / width**2 + (share - smooth) ** 2
        variance = self.units * spread + 2 * smooth**2 + 2 * (1 - smooth) ** 2
        # A mean's size has a floor, so that its variance need not be shared out over the added values too.
        variance /= self.units if self.is_mean else self.units + 4
        return self.units * smooth * (1 - smooth) / variance, math.sqrt(variance / self.units)


def plain_mean(parts: Sequence[BoundedMean]) -> BoundedMean:
    """The plain mean of estimates from independent data sets, all of which are defined."""
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
