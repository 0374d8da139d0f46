"""Every metric of a set of predictions with its interval, and differences of two methods.

Intervals by metric:

- means over predictions (:data:`MEANS`), AURC and selective accuracy: exact binomial interval of an
  effective size (:class:`.bounds.BoundedMean`);
- ECE: bounds over the signs of its bins (:mod:`.ece`);
- tokens to confidence, which has no upper bound: bootstrap percentiles;
- MCE, the parts of the Brier score and the log score: none.  The first are biased by noise as ECE is, and one unseen
  wrong answer of confidence 1 changes the log score without limit.

A prediction's influence on a mean is how far it moves the estimate (times n): its deviation from the mean, or for AUROC
the deviation of its placement among the answers of the other class (DeLong, DeLong and Clarke-Pearson, 1988).
Influences of the samples of one question are added before they are squared, so that samples which agree count once.

``tests/evaluation/test_coverage.py`` and ``benchmarks/interval_coverage.py`` measure the coverage.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from coca_mindspeed.evaluation.intervals.bounds import (
    UNDEFINED_INTERVAL,
    BoundedMean,
    Interval,
    plain_mean,
    shifted_percentiles,
)
from coca_mindspeed.evaluation.intervals.ece import Bins, EceUnderCalibration, ece_interval, ece_under_calibration
from coca_mindspeed.evaluation.metrics.binning import Floats
from coca_mindspeed.evaluation.metrics.calibration import CalibrationMetrics, metrics_of
from coca_mindspeed.evaluation.metrics.weighted import MetricOptions, WeightedSample, coverage_of
from coca_mindspeed.evaluation.predictions import Outcomes

MEANS = ("accuracy", "success_rate", "brier", "auroc")


def question_index(questions: npt.NDArray[Any] | None, rows: int) -> npt.NDArray[np.intp]:
    """Return the number of each row's question (rows,), from 0; without ``questions`` every row has its own.

    Raises ValueError if the lengths differ.
    """
    if questions is None:
        return np.arange(rows)
    if len(questions) != rows:
        raise ValueError(f"questions should have length {rows}, found {len(questions)}")
    return np.asarray(np.unique(questions, return_inverse=True)[1], dtype=np.intp)


def independent_units(question: npt.NDArray[np.intp]) -> float:
    """Return the effective number of independent answers if all samples of a question agree: (sum k)^2 / sum k^2."""
    samples = np.unique(question, return_counts=True)[1].astype(np.float64)
    return float(samples.sum() ** 2 / (samples**2).sum()) if len(samples) else 0.0


@dataclass(frozen=True, slots=True)
class Influence:
    """A mean (NaN where undefined) and the influence ``moves`` (n,) of each prediction on it.

    ``units`` is the number of independent questions, ``most`` the number of answers if each is binary.
    """

    value: float
    moves: Floats
    units: float
    most: float | None = None

    def variance(self, question: npt.NDArray[np.intp]) -> float:
        """Variance of the mean, with each question's predictions taken together."""
        together = np.bincount(question, weights=self.moves)
        factor = len(together) / max(len(together) - 1, 1)
        return float((together**2).sum() / len(question) ** 2 * factor)

    def mean(self, question: npt.NDArray[np.intp]) -> BoundedMean:
        if math.isnan(self.value):
            return BoundedMean(math.nan, math.nan, 0.0)
        return BoundedMean(self.value, self.variance(question), self.units, self.most)


def influences(data: Outcomes, question: npt.NDArray[np.intp]) -> Mapping[str, Influence]:
    """Return the influences on every metric of :data:`MEANS`; ``question`` is the question of each prediction (n,)."""
    everywhere = np.ones(len(data), dtype=np.bool_)
    valid = ~np.isnan(data.confidence)
    right = data.correct.astype(np.float64)
    loss = np.where(valid, (data.confidence - right) ** 2, 0.0)
    return {
        "accuracy": _mean(right, everywhere, question, is_share=True),
        "success_rate": _mean(valid.astype(np.float64), everywhere, question, is_share=True),
        "brier": _mean(loss, valid, question),
        "auroc": _auroc(data, valid, question),
    }


def difference(first: Influence, second: Influence, question: npt.NDArray[np.intp]) -> BoundedMean:
    """Return ``second - first`` of two methods on the same predictions, row by row."""
    value = second.value - first.value
    if math.isnan(value):
        return BoundedMean(math.nan, math.nan, 0.0, lower=-1.0)
    units = min(first.units, second.units)
    both = Influence(value, second.moves - first.moves, units)
    return BoundedMean(value, both.variance(question), units, lower=-1.0)


def _mean(
    values: Floats, over: npt.NDArray[np.bool_], question: npt.NDArray[np.intp], *, is_share: bool = False
) -> Influence:
    count = int(over.sum())
    if not count:
        return Influence(math.nan, np.zeros(len(values)), 0.0)
    mean = float(values[over].mean())
    moves = np.where(over, (values - mean) * len(values) / count, 0.0)
    return Influence(mean, moves, independent_units(question[over]), float(count) if is_share else None)


def _auroc(data: Outcomes, valid: npt.NDArray[np.bool_], question: npt.NDArray[np.intp]) -> Influence:
    right, wrong = valid & data.correct, valid & ~data.correct
    n_right, n_wrong = int(right.sum()), int(wrong.sum())
    moves = np.zeros(len(data))
    if not n_right or not n_wrong:
        return Influence(math.nan, moves, 0.0)
    from scipy.stats import rankdata  # takes a second to import, which a refusal must not

    ranks = np.zeros(len(data))
    ranks[valid] = rankdata(data.confidence[valid])
    # Fraction of the other class below a correct answer, and above a wrong one; ties half.
    placed_right = (ranks[right] - rankdata(data.confidence[right])) / n_wrong
    placed_wrong = 1 - (ranks[wrong] - rankdata(data.confidence[wrong])) / n_right
    area = float(placed_right.mean())
    moves[right] = (placed_right - area) * len(data) / n_right
    moves[wrong] = (placed_wrong - area) * len(data) / n_wrong
    # The variance is at most area (1 - area) / size of the rarer class (Birnbaum and Klose, 1957).
    return Influence(area, moves, min(independent_units(question[right]), independent_units(question[wrong])))


_RESAMPLED = "tokens_to_confidence"


class Estimates:
    """The metrics of n predictions with their intervals.

    ``questions`` (n,) are equal for samples of the same question (None: every prediction has its own).  ``replicates``
    and ``seed`` are of the bootstrap and of the redrawings under perfect calibration.
    """

    def __init__(
        self,
        data: Outcomes,
        *,
        questions: npt.NDArray[Any] | None = None,
        replicates: int = 1000,
        seed: int = 0,
        options: MetricOptions | None = None,
    ) -> None:
        if replicates < 1:
            raise ValueError(f"replicates should be at least 1, found {replicates}")
        self.data, self._replicates, self._seed = data, replicates, seed
        self.sample = WeightedSample(
            data.confidence, data.correct, data.tokens_to_confidence, options or MetricOptions()
        )
        self.question = question_index(questions, len(data))
        self.metrics: CalibrationMetrics = metrics_of(self.sample)
        self.values = self.metrics.values
        self.influences = influences(data, self.question)

    @cached_property
    def replicates(self) -> dict[str, Floats]:
        """Bootstrap replicates (r,) of every metric, NaN where undefined."""
        return resample([self.sample], self.question, self._replicates, self._seed)[0]

    @cached_property
    def calibrated(self) -> EceUnderCalibration:
        """ECE under perfect calibration with these confidences."""
        sample = self.sample
        return ece_under_calibration(
            sample.values, sample.group_counts, sample.bin_starts, draws=self._replicates, seed=self._seed
        )

    @cached_property
    def bins(self) -> Bins:
        """Sums of the non-empty bins."""
        count, right, stated = (sums[::-1] for sums in self.sample.bin_sums())
        return Bins(count, right, stated, self.values["brier"], self._units(self.sample.n_valid))

    def bounded(self, name: str) -> BoundedMean:
        """Return a metric in [0, 1] that is a mean or behaves like one."""
        if name in MEANS:
            return self.influences[name].mean(self.question)
        units, most = self._places(name)
        return _resampled_mean(self.values[name], self.replicates[name], units, most=most)

    def interval(self, name: str, level: float = 0.95) -> Interval:
        """Return the interval of a metric; NaN bounds if it has none."""
        estimate = self.values[name]
        if math.isnan(estimate):
            return UNDEFINED_INTERVAL
        if name == "ece":
            found = ece_interval(self.bins, level)
            # The estimate may be debiased (MetricOptions.debias).
            return Interval(estimate, min(found.low, estimate), max(found.high, estimate))
        if name == _RESAMPLED:
            return shifted_percentiles(estimate, self.replicates[name], level, 0.0)
        if has_interval(name):
            return self.bounded(name).interval(level)
        return Interval(estimate, math.nan, math.nan)

    def _units(self, answers: float) -> float:
        """Independent questions in this many answers of those with a confidence."""
        valid = ~np.isnan(self.data.confidence)
        return independent_units(self.question[valid]) * answers / max(self.sample.n_valid, 1)

    def _places(self, name: str) -> tuple[float, float | None]:
        """Independent questions of a metric of ranked answers, and their number if it is a proportion."""
        if (coverage := coverage_of(name)) is not None:
            places = math.ceil(round(coverage * self.sample.n_valid, 9))
            return self._units(places), float(places)
        # The k-th answer weighs 1/k + ... + 1/n, and (sum of weights)^2 / sum of their squares is n / 2.
        return self._units(self.sample.n_valid / 2), None


def has_interval(name: str) -> bool:
    """Whether a metric has an interval."""
    return name in (*MEANS, "ece", _RESAMPLED, "aurc") or coverage_of(name) is not None


def paired_intervals(first: Estimates, second: Estimates, level: float = 0.95) -> dict[str, Interval]:
    """Return intervals of ``second - first`` for each metric that has one; rows are paired by question and sample.

    ECE has no paired interval of known coverage; its interval is the difference of both methods' intervals, each at
    half the error.

    Raises:
        ValueError: the predictions do not correspond.
    """
    if len(first.data) != len(second.data):
        raise ValueError(f"paired predictions should have one length, found {len(first.data)} and {len(second.data)}")
    if not np.array_equal(first.question, second.question):
        raise ValueError("paired predictions should be of the same questions, row by row")
    before, after = resample([first.sample, second.sample], first.question, first._replicates, first._seed)
    found = {}
    for name in first.values:
        estimate = second.values[name] - first.values[name]
        if math.isnan(estimate):
            found[name] = UNDEFINED_INTERVAL
        elif name == "ece":
            one, other = (each.interval(name, 1 - (1 - level) / 2) for each in (first, second))
            found[name] = Interval(estimate, other.low - one.high, other.high - one.low)
        elif name in MEANS:
            change = difference(first.influences[name], second.influences[name], first.question)
            found[name] = change.interval(level)
        elif name == _RESAMPLED:
            found[name] = shifted_percentiles(estimate, after[name] - before[name], level)
        elif has_interval(name):
            units = min(each._places(name)[0] for each in (first, second))
            found[name] = _resampled_mean(estimate, after[name] - before[name], units, lower=-1.0).interval(level)
        else:
            found[name] = Interval(estimate, math.nan, math.nan)
    return found


def average_interval(parts: Sequence[Estimates], name: str, level: float = 0.95) -> Interval:
    """Return the interval of the plain mean over independent data sets, on each of which the metric is defined."""
    if len(parts) == 1:
        return parts[0].interval(name, level)
    estimate = float(np.mean([part.values[name] for part in parts]))
    if name == "ece":
        # A union bound: noise is not smaller in the mean of estimates that are biased upwards.
        each = [part.interval(name, 1 - (1 - level) / len(parts)) for part in parts]
        return Interval(estimate, float(np.mean([i.low for i in each])), float(np.mean([i.high for i in each])))
    if name == _RESAMPLED:
        values = np.mean([part.replicates[name] for part in parts], axis=0)
        return shifted_percentiles(estimate, values, level, 0.0)
    if has_interval(name):
        return plain_mean([part.bounded(name) for part in parts]).interval(level)
    return Interval(estimate, math.nan, math.nan)


def average_under_calibration(parts: Sequence[Estimates]) -> EceUnderCalibration:
    """Return the mean over data sets of the ECE under perfect calibration."""
    return EceUnderCalibration(np.mean([part.calibrated.draws for part in parts], axis=0))


def _resampled_mean(
    value: float, replicates: npt.NDArray[np.float64], units: float, *, most: float | None = None, lower: float = 0.0
) -> BoundedMean:
    known = replicates[~np.isnan(replicates)]
    if math.isnan(value) or not len(known) or units <= 0:
        return BoundedMean(math.nan, math.nan, 0.0, lower=lower)
    return BoundedMean(value, float(known.var()), units, most, lower, is_mean=False)


_BLOCK = 1 << 16  # weights computed at once, replicates times predictions; larger blocks leave the processor's cache


def _draws(units: int, replicates: int, rows: int, rng: np.random.Generator) -> Iterator[Floats]:
    """Yield blocks of bootstrap weights (r, units); each row draws ``units`` out of ``units`` with replacement."""
    size = max(1, _BLOCK // max(rows, 1))
    for start in range(0, replicates, size):
        count = min(size, replicates - start)
        drawn = rng.integers(0, units, size=(count, units))
        drawn += np.arange(count)[:, None] * units
        yield np.bincount(drawn.ravel(), minlength=count * units).reshape(count, units).astype(np.float64)


def resample(
    samples: list[WeightedSample], question: npt.NDArray[np.intp], replicates: int, seed: int
) -> list[dict[str, Floats]]:
    """Return the replicates of every sample; all samples get the same draws of questions.

    Predictions of the samples correspond row by row; ``question`` is the number of each row's question (n,).
    """
    rows, count = samples[0].n, int(question.max(initial=-1)) + 1
    blocks: list[list[dict[str, Floats]]] = [[] for _ in samples]
    # Draws are exchangeable: a single sample with one answer per question needs no reordering.
    in_order = len(samples) == 1 and count == rows
    if not rows:
        return [sample.metrics(np.ones((replicates, 0))) for sample in samples]
    for weights in _draws(count, replicates, rows, np.random.default_rng(seed)):
        for sample, done in zip(samples, blocks, strict=True):
            done.append(sample.metrics(weights if in_order else weights[:, question[sample.order]]))
    return [{name: np.concatenate([block[name] for block in done]) for name in done[0]} for done in blocks]
