"""Expected calibration error: bounds that hold for well calibrated models too, and its value under perfect calibration.

ECE is the sum over bins of |mean gap|, and noise only raises it, so bootstrap percentiles do not cover a true error
near zero.  ECE is the maximum, over all signs of the bins, of the mean of sign * (confidence - correct).  For fixed
signs this is a mean of independent values with an interval of its own, and

- the true signs are among them, so the largest upper bound over *all* signs bounds the error from above, without a
  correction for their number;
- the error is at least the mean for *any* signs, so the largest lower bound over a few of them, corrected for their
  number, bounds it from below.  These are the signs that change at most once from the lowest bin to the highest.

For fixed signs the wider of two bounds is used: the exact binomial one (answers that count for the error, of all
answers) holds for these confidences at every size; Student's, on the values, adds the variation of the confidences.
"""

import math
from dataclasses import dataclass

import numpy as np
from scipy.special import stdtrit

from coca_mindspeed.evaluation.binning import Floats, binomial_low
from coca_mindspeed.evaluation.metrics import Groups


@dataclass(frozen=True, slots=True)
class Bins:
    """Sums of the non-empty bins, in ascending confidence: answers, correct answers and confidences, ``[bins]`` each.

    ``brier`` is the mean squared error of all answers, ``units`` the number of independent questions.
    """

    count: Floats
    right: Floats
    stated: Floats
    brier: float
    units: float

    @property
    def n(self) -> float:
        return float(self.count.sum())

    @property
    def gaps(self) -> Floats:
        """Each bin's part of the mean of confidence - correct, ``[bins]``."""
        return np.asarray((self.stated - self.right) / self.n)


def ece_bounds(bins: Bins, level: float = 0.95) -> tuple[float, float]:
    """Return the bounds of ECE, of at least one answer; they enclose its plain estimate."""
    estimate, tail = float(np.abs(bins.gaps).sum()), (1 - level) / 2
    low, high = _low(bins, tail), max(_high_exact(bins, tail), _high_student(bins, estimate, tail))
    return float(np.clip(low, 0.0, estimate)), float(np.clip(high, estimate, 1.0))


def _low(bins: Bins, tail: float) -> float:
    """Largest lower bound over the signs that change at most once."""
    b = len(bins.count)
    once = np.where(np.arange(b) < np.arange(b)[:, None], -1, 1)  # [b, b]: minus below the i-th bin
    signs = np.concatenate([once, -once])  # [2 b, b]
    means = signs @ bins.gaps
    share = np.where(signs > 0, bins.count - bins.right, bins.right).sum(axis=1) / bins.n
    tail /= len(signs)
    exact = share - binomial_low(share * bins.units, bins.units, tail)
    spread = np.sqrt(np.maximum(bins.brier - means**2, 0) / max(bins.units - 1, 1))
    student = stdtrit(max(bins.units - 1, 1), 1 - tail) * spread
    return float((means - np.maximum(exact, student)).max())


def _high_exact(bins: Bins, tail: float) -> float:
    """Largest exact upper bound over all 2^b signs.

    Signs enter by two sums only: the mean gap and the number of answers that count for it (wrong answers in bins of
    sign plus, correct ones in the others).  The largest mean gap for each number is found bin by bin.
    """
    n = round(bins.n)
    largest = np.full(n + 1, -np.inf)
    largest[0] = 0.0
    for count, right, gap in zip(bins.count.astype(int), bins.right.astype(int), bins.gaps, strict=True):
        following = np.full(n + 1, -np.inf)
        for counted, part in ((count - right, gap), (right, -gap)):
            following[counted:] = np.maximum(following[counted:], largest[: n + 1 - counted] + part)
        largest = following
    # No exact bound lies further above its share than Hoeffding's, so most counts need not be looked at.
    reach = math.sqrt(math.log(1 / tail) / (2 * bins.units))
    counts = np.flatnonzero(largest + reach >= largest.max())
    above = 1 - counts / n - binomial_low((1 - counts / n) * bins.units, bins.units, tail)
    return float((largest[counts] + above).max())


def _high_student(bins: Bins, estimate: float, tail: float) -> float:
    """Largest upper bound by Student's t over all signs.

    The mean square of sign * (confidence - correct) is the Brier score for all signs, so the bound depends on the mean
    m alone: m + t sqrt((brier - m^2) / (units - 1)), which rises up to m = sqrt(brier / (1 + h)) and then falls.
    """
    freedom = max(bins.units - 1, 1)
    h = float(stdtrit(freedom, 1 - tail)) ** 2 / freedom
    mean = min(estimate, math.sqrt(bins.brier / (1 + h)))
    return mean + math.sqrt(h * max(bins.brier - mean**2, 0.0))


_BLOCK = 1 << 18  # numbers drawn at once: draws times distinct confidences


@dataclass(frozen=True, slots=True)
class EceUnderCalibration:
    """ECE under perfect calibration: of answers redrawn with the stated confidences as probabilities.

    ``draws`` ``[r]`` has one value for each redrawing; NaN without valid answers.
    """

    draws: Floats

    @property
    def mean(self) -> float:
        return float(self.draws.mean())

    @property
    def high(self) -> float:
        """The 95% quantile."""
        return float(np.quantile(self.draws, 0.95))

    def as_dict(self) -> dict[str, float | None]:
        """Return strict JSON, None where undefined."""
        return {"mean": None, "p95": None} if math.isnan(self.mean) else {"mean": self.mean, "p95": self.high}


def ece_under_calibration(groups: Groups, draws: int = 1000, seed: int = 0) -> EceUnderCalibration:
    """Redraw the answers ``draws`` times."""
    if not len(groups.values):
        return EceUnderCalibration(np.full(draws, np.nan))
    rng, whole = np.random.default_rng(seed), groups.count.astype(np.int64)
    size = max(1, _BLOCK // len(whole))
    alone, found = bool(whole.max() == 1), []
    for start in range(0, draws, size):
        shape = (min(size, draws - start), len(whole))
        # A uniform draw is several times faster than a binomial one of a single answer.
        right = rng.random(shape) < groups.values if alone else rng.binomial(whole, groups.values, size=shape)
        gap = np.add.reduceat(right - whole * groups.values, groups.bin_starts, axis=1)
        found.append(np.abs(gap).sum(axis=1) / whole.sum())
    return EceUnderCalibration(np.concatenate(found))
