"""Intervals of the metrics, of differences of two methods, and of averages over data sets.

- A metric that is a mean of values in [0, 1] (:data:`MEANS`): the exact binomial interval (Clopper and Pearson, 1934)
  of an *effective size*, the number of binary answers of the same variance (Korn and Graubard, 1998).  It holds for
  small sets and where all answers are correct; a bootstrap and a normal interval have no width there.
- Tokens to confidence, which has no upper bound: Student's t.
- ECE: bounds over the signs of its bins, see :func:`ece_bounds`.
- Others: none.  The parts of the Brier score are biased by noise as ECE is, one unseen wrong answer of
  confidence 1 changes the log score without limit, and one answer can move many ranks of AURC.

A prediction's influence on a mean is n times the change of the estimate that it causes: its deviation from the mean, or
for AUROC the deviation of its placement among the answers of the other class (DeLong, DeLong and Clarke-Pearson, 1988).
Influences of the samples of one question are added before they are squared, so that samples that agree count once.

``docs/evaluation.md`` gives their measured coverage.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.special import ndtri, stdtrit

from coca_mindspeed.evaluation.metrics import (
    DEFAULT_OPTIONS,
    CalibrationMetrics,
    ConfidenceGroups,
    Floats,
    MetricOptions,
    binomial_low,
    calibration_metrics,
)
from coca_mindspeed.evaluation.predictions import GradedPredictions
from coca_mindspeed.utils.json_files import replace_nonfinite


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate with two bounds; NaN where undefined."""

    estimate: float
    low: float = math.nan
    high: float = math.nan

    def as_dict(self) -> dict[str, float | None]:
        """Return strict JSON, None for NaN."""
        return replace_nonfinite(asdict(self))


@dataclass(frozen=True, slots=True)
class Mean:
    """An estimated mean."""

    value: float
    influence: Floats  # of each prediction on the estimate, [n]
    units: float  # number of independent questions
    most: float | None = None  # number of answers if each is binary, which bounds the effective size
    bounds: tuple[float, float] = (0.0, 1.0)  # the smallest and largest value of one answer

    def minus(self, other: "Mean") -> "Mean":
        """Return the difference of two methods on the same predictions, row by row."""
        reach = self.bounds[1]
        return replace(
            self,
            value=self.value - other.value,
            influence=self.influence - other.influence,
            units=min(self.units, other.units),
            most=None,
            bounds=(-reach, reach),
        )

    def variance(self, question: npt.NDArray[np.intp]) -> float:
        """Variance of the estimate, with each question's predictions taken together; NaN where undefined."""
        if math.isnan(self.value):
            return math.nan
        together = np.bincount(question, weights=self.influence)
        factor = len(together) / max(len(together) - 1, 1)
        return float((together**2).sum() / len(question) ** 2 * factor)

    def interval(self, variance: float, level: float = 0.95) -> Interval:
        """Return the interval of an estimate with this variance."""
        if math.isnan(self.value) or self.units <= 0:
            return Interval(self.value)
        normal, student = float(ndtri(0.5 + level / 2)), float(stdtrit(max(self.units - 1, 1), 0.5 + level / 2))
        low, high = self.bounds
        if math.isinf(high):
            reach = student * math.sqrt(variance)
            return Interval(self.value, max(low, self.value - reach), self.value + reach)
        width = high - low
        share = min(1.0, max(0.0, (self.value - low) / width))
        # Two values are added at either end (Agresti and Coull, 1998): equal values do not prove that none differs.
        smooth = (self.units * share + 2) / (self.units + 4)
        spread = self.units * variance / width**2 + (share - smooth) ** 2
        of_one = (self.units * spread + 2 * smooth**2 + 2 * (1 - smooth) ** 2) / self.units
        size = self.units * smooth * (1 - smooth) / of_one
        # The variance is estimated: Student's quantiles are wider than the normal's.
        size = max(size * (normal / student) ** 2, self.units)
        if self.most is not None:
            size = min(size, self.most)
        tail = (1 - level) / 2
        lower = float(binomial_low(size * share, size, tail))
        upper = 1 - float(binomial_low(size * (1 - share), size, tail))
        return Interval(self.value, min(self.value, low + width * lower), max(self.value, low + width * upper))


@dataclass(frozen=True, slots=True)
class Bins:
    """Sums of the non-empty bins, in ascending confidence, ``[bins]`` each."""

    count: Floats  # answers
    right: Floats  # correct answers
    stated: Floats  # confidences
    brier: float  # mean squared error of all answers
    units: float  # number of independent questions

    @property
    def n(self) -> float:
        return float(self.count.sum())

    @property
    def gaps(self) -> Floats:
        """Each bin's part of the mean of confidence - correct, ``[bins]``."""
        return np.asarray((self.stated - self.right) / self.n)


def ece_bounds(bins: Bins, level: float = 0.95) -> tuple[float, float]:
    """Return the bounds of ECE, of at least one answer; they enclose its plain estimate.

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
    """ECE under perfect calibration: of answers redrawn with the stated confidences as probabilities."""

    draws: Floats  # one value for each redrawing, [r]; NaN without valid answers

    @property
    def mean(self) -> float:
        return float(self.draws.mean())

    @property
    def high(self) -> float:
        """The 95% quantile."""
        return float(np.quantile(self.draws, 0.95))

    def as_dict(self) -> dict[str, float | None]:
        """Return strict JSON, None where undefined."""
        return replace_nonfinite({"mean": self.mean, "p95": self.high})


def ece_under_calibration(groups: ConfidenceGroups, draws: int = 1000, seed: int = 0) -> EceUnderCalibration:
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


def independent_units(question: npt.NDArray[np.intp]) -> float:
    """Return the effective number of independent answers if all samples of a question agree: (sum k)^2 / sum k^2."""
    samples = np.unique(question, return_counts=True)[1].astype(np.float64)
    return float(samples.sum() ** 2 / (samples**2).sum()) if len(samples) else 0.0


def means_of(data: GradedPredictions, question: npt.NDArray[np.intp]) -> Mapping[str, Mean]:
    """Return every metric of :data:`MEANS`; ``question`` is the question of each prediction, ``[n]``."""
    everywhere = np.ones(len(data), dtype=np.bool_)
    valid = ~np.isnan(data.confidence)
    right, tokens = data.correct.astype(np.float64), data.tokens_to_confidence
    return {
        "accuracy": _mean(right, everywhere, question, is_share=True),
        "success_rate": _mean(valid.astype(np.float64), everywhere, question, is_share=True),
        "brier": _mean((data.confidence - right) ** 2, valid, question),
        "auroc": _auroc(data, valid, question),
        "tokens_to_confidence": _mean(tokens, ~np.isnan(tokens), question, bounds=(0.0, math.inf)),
    }


def _mean(
    values: Floats,
    over: npt.NDArray[np.bool_],
    question: npt.NDArray[np.intp],
    *,
    is_share: bool = False,
    bounds: tuple[float, float] = (0.0, 1.0),
) -> Mean:
    count = int(over.sum())
    if not count:
        return Mean(math.nan, np.zeros(len(values)), 0.0, bounds=bounds)
    mean = float(values[over].mean())
    influence = np.where(over, (values - mean) * len(values) / count, 0.0)
    return Mean(mean, influence, independent_units(question[over]), float(count) if is_share else None, bounds)


def _auroc(data: GradedPredictions, valid: npt.NDArray[np.bool_], question: npt.NDArray[np.intp]) -> Mean:
    right, wrong = valid & data.correct, valid & ~data.correct
    n_right, n_wrong = int(right.sum()), int(wrong.sum())
    influence = np.zeros(len(data))
    if not n_right or not n_wrong:
        return Mean(math.nan, influence, 0.0)
    from scipy.stats import rankdata  # takes a second to import, which a refusal must not

    ranks = np.zeros(len(data))
    ranks[valid] = rankdata(data.confidence[valid])
    # Fraction of the other class below a correct answer, and above a wrong one; ties half.
    placed_right = (ranks[right] - rankdata(data.confidence[right])) / n_wrong
    placed_wrong = 1 - (ranks[wrong] - rankdata(data.confidence[wrong])) / n_right
    area = float(placed_right.mean())
    influence[right] = (placed_right - area) * len(data) / n_right
    influence[wrong] = (placed_wrong - area) * len(data) / n_wrong
    # The variance is at most area (1 - area) / size of the rarer class (Birnbaum and Klose, 1957).
    return Mean(area, influence, min(independent_units(question[right]), independent_units(question[wrong])))


MEANS = ("accuracy", "success_rate", "brier", "auroc", "tokens_to_confidence")


class Estimates:
    """The metrics of n predictions with their intervals.

    ``questions`` ``[n]`` are equal for samples of the same question (None: every prediction has its own).
    ``replicates`` and ``seed`` are of the redrawings under perfect calibration.
    """

    def __init__(
        self,
        data: GradedPredictions,
        *,
        questions: npt.NDArray[Any] | None = None,
        replicates: int = 1000,
        seed: int = 0,
        options: MetricOptions = DEFAULT_OPTIONS,
    ) -> None:
        questions = np.arange(len(data)) if questions is None else questions
        if len(questions) != len(data):
            raise ValueError(f"questions should have length {len(data)}, found {len(questions)}")
        self.data, self._replicates, self._seed = data, replicates, seed
        self._options = options
        self.question = np.asarray(np.unique(questions, return_inverse=True)[1], dtype=np.intp)
        self.metrics: CalibrationMetrics = calibration_metrics(
            data.confidence, data.correct, data.tokens_to_confidence, options
        )
        self.values = self.metrics.values
        self.means = means_of(data, self.question)

    @cached_property
    def groups(self) -> ConfidenceGroups:
        return ConfidenceGroups.of(self.data.confidence, self.data.correct, self._options)

    @cached_property
    def calibrated(self) -> EceUnderCalibration:
        """ECE under perfect calibration with these confidences."""
        return ece_under_calibration(self.groups, self._replicates, self._seed)

    def interval(self, name: str, level: float = 0.95) -> Interval:
        """Return the interval of a metric; NaN bounds if it has none."""
        estimate = self.values[name]
        if name in MEANS:
            return self.means[name].interval(self.means[name].variance(self.question), level)
        if name != "ece" or math.isnan(estimate):
            return Interval(estimate)
        units = independent_units(self.question[~np.isnan(self.data.confidence)])
        count, right, stated = (sums[::-1] for sums in self.groups.bin_sums())
        return Interval(estimate, *ece_bounds(Bins(count, right, stated, self.values["brier"], units), level))


def paired_intervals(first: Estimates, second: Estimates, level: float = 0.95) -> dict[str, Interval]:
    """Return the interval of ``second - first`` for each metric; rows are paired by question and sample.

    ECE has no paired interval of known coverage; its interval is the difference of both methods' intervals, each at
    half the error.

    Raises ValueError: the predictions do not correspond.
    """
    if not np.array_equal(first.question, second.question):
        raise ValueError("paired predictions should be of the same questions, row by row")
    intervals = {name: Interval(second.values[name] - first.values[name]) for name in first.values}
    for name in MEANS:
        change = second.means[name].minus(first.means[name])
        intervals[name] = change.interval(change.variance(first.question), level)
    one, other = (estimates.interval("ece", 1 - (1 - level) / 2) for estimates in (first, second))
    intervals["ece"] = Interval(intervals["ece"].estimate, other.low - one.high, other.high - one.low)
    return intervals


def average_interval(parts: Sequence[Estimates], name: str, level: float = 0.95) -> Interval:
    """Return the interval of the plain mean over independent data sets, on each of which the metric is defined."""
    count = len(parts)
    if count == 1:
        return parts[0].interval(name, level)
    estimate = float(np.mean([part.values[name] for part in parts]))
    if name == "ece":
        # A union bound: noise is not smaller in the mean of estimates that are biased upwards.
        found = [part.interval(name, 1 - (1 - level) / count) for part in parts]
        return Interval(estimate, float(np.mean([i.low for i in found])), float(np.mean([i.high for i in found])))
    if name not in MEANS:
        return Interval(estimate)
    return _average([part.means[name] for part in parts], parts, level)


def average_difference(pairs: Sequence[tuple[Estimates, Estimates]], name: str, level: float = 0.95) -> Interval:
    """Return the interval of the plain mean of ``second - first`` over the pairs of independent data sets."""
    if name == "ece" or len(pairs) == 1:
        found = [paired_intervals(*pair, 1 - (1 - level) / len(pairs))[name] for pair in pairs]
        return Interval(*(float(np.mean([getattr(i, of) for i in found])) for of in ("estimate", "low", "high")))
    if name not in MEANS:
        return Interval(float(np.mean([second.values[name] - first.values[name] for first, second in pairs])))
    changes = [second.means[name].minus(first.means[name]) for first, second in pairs]
    return _average(changes, [first for first, _ in pairs], level)


def _average(means: Sequence[Mean], parts: Sequence[Estimates], level: float) -> Interval:
    """The interval of the plain mean of ``means``, one of each part."""
    count = len(means)
    variance = sum(mean.variance(part.question) for mean, part in zip(means, parts, strict=True)) / count**2
    value = float(np.mean([mean.value for mean in means]))
    units = count * min(mean.units for mean in means)
    return replace(means[0], value=value, units=units, most=None).interval(variance, level)


def average_under_calibration(parts: Sequence[Estimates]) -> EceUnderCalibration:
    """Return the mean over data sets of the ECE under perfect calibration."""
    return EceUnderCalibration(np.mean([part.calibrated.draws for part in parts], axis=0))
