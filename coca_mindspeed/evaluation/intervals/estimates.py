"""Every metric of a set of predictions with an interval that was shown to hold, and differences of two methods.

Which interval a metric gets:

- means over predictions (:data:`.influence.MEANS`), the area under risk and coverage and selective accuracy: the exact
  binomial one of an effective size (:class:`.intervals.BoundedMean`);
- ECE: bounds over the signs of its bins (:mod:`.ece_interval`);
- tokens to confidence: percentiles of the bootstrap, since they have no upper bound;
- MCE, the parts of the Brier score and the log score: none.  The first ones are biased by noise as ECE is, and one
  unseen wrong answer of confidence 1 moves the log score further than any data tell.

``tests/evaluation/test_coverage.py`` and ``benchmarks/interval_coverage.py`` measure what they cover.
"""

import math
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from coca_mindspeed.evaluation.intervals.bootstrap import Replicates, resample, shifted_percentiles
from coca_mindspeed.evaluation.intervals.bounds import UNDEFINED_INTERVAL, BoundedMean, Interval, plain_mean
from coca_mindspeed.evaluation.intervals.ece import Bins, CalibratedEce, calibrated_ece, ece_interval, mean_calibrated
from coca_mindspeed.evaluation.intervals.influence import (
    MEANS,
    Influence,
    difference,
    independent_units,
    influences,
    question_index,
)
from coca_mindspeed.evaluation.metrics.calibration import CalibrationMetrics, metrics_of
from coca_mindspeed.evaluation.metrics.weighted import MetricOptions, WeightedSample, coverage_of
from coca_mindspeed.evaluation.predictions import Outcomes

_RESAMPLED = "tokens_to_confidence"


class Estimates:
    """The metrics of n predictions.

    Args:
        data: the predictions' arrays.
        questions: (n,), equal for samples of the same question; None where every prediction is of its own.
        replicates: of the bootstrap, and redrawings of a calibrated model's answers.
        seed: equal seeds give equal intervals.
        options: of the metrics.
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
        self.values = self.metrics.values()
        self.influences = influences(data, self.question)

    @cached_property
    def replicates(self) -> Replicates:
        """The bootstrap's; made when a metric needs them."""
        [values] = resample([self.sample], self.question, self._replicates, self._seed)
        return Replicates(self.values, values)

    @cached_property
    def calibrated(self) -> CalibratedEce:
        """The ECE that a calibrated model with these confidences shows."""
        sample = self.sample
        return calibrated_ece(
            sample.values, sample.group_counts, sample.bin_starts, draws=self._replicates, seed=self._seed
        )

    @cached_property
    def bins(self) -> Bins:
        """Counts of the bins that are not empty."""
        count, right, stated = (sums[::-1] for sums in self.sample.bin_sums())
        return Bins(count, right, stated, self.values["brier"], self._units(self.sample.n_valid))

    def bounded(self, name: str) -> BoundedMean:
        """A metric in [0, 1] that is a mean, or behaves like one."""
        if name in MEANS:
            return self.influences[name].mean(self.question)
        units, most = self._places(name)
        return _resampled_mean(self.values[name], self.replicates.values[name], units, most=most)

    def interval(self, name: str, level: float = 0.95) -> Interval:
        """The interval of a metric; NaN bounds where it has none."""
        estimate = self.values[name]
        if math.isnan(estimate):
            return UNDEFINED_INTERVAL
        if name == "ece":
            found = ece_interval(self.bins, level)
            # The estimate may have its bias taken off (MetricOptions.debias).
            return Interval(estimate, min(found.low, estimate), max(found.high, estimate))
        if name == _RESAMPLED:
            return self.replicates.interval(name, level)
        if has_interval(name):
            return self.bounded(name).interval(level)
        return Interval(estimate, math.nan, math.nan)

    def _units(self, answers: float) -> float:
        """Independent questions in so many answers of those with a confidence."""
        valid = ~np.isnan(self.data.confidence)
        return independent_units(self.question[valid]) * answers / max(self.sample.n_valid, 1)

    def _places(self, name: str) -> tuple[float, float | None]:
        """Independent questions that a metric of ranked answers rests on, and their number if it is a share."""
        if (coverage := coverage_of(name)) is not None:
            places = math.ceil(round(coverage * self.sample.n_valid, 9))
            return self._units(places), float(places)
        # The k-th answer weighs 1/k + ... + 1/n, and (sum of weights)^2 / sum of their squares is n / 2.
        return self._units(self.sample.n_valid / 2), None


def has_interval(name: str) -> bool:
    """Whether a metric has an interval at all (see above)."""
    return name in (*MEANS, "ece", _RESAMPLED, "aurc") or coverage_of(name) is not None


def paired_intervals(first: Estimates, second: Estimates, level: float = 0.95) -> dict[str, Interval]:
    """Intervals of ``second - first`` for each metric that has one.

    The two are of the same questions: row i of both is one question's i-th sample.  ECE has no paired
    interval that is known to hold, so its is the difference of both methods' intervals, each at half the error.

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
            both: tuple[Influence, Influence] = (first.influences[name], second.influences[name])
            found[name] = difference(*both, first.question).interval(level)
        elif name == _RESAMPLED:
            found[name] = shifted_percentiles(estimate, after[name] - before[name], level)
        elif has_interval(name):
            units = min(each._places(name)[0] for each in (first, second))
            found[name] = _resampled_mean(estimate, after[name] - before[name], units, lower=-1.0).interval(level)
        else:
            found[name] = Interval(estimate, math.nan, math.nan)
    return found


def average_interval(parts: Sequence[Estimates], name: str, level: float = 0.95) -> Interval:
    """The interval of the plain mean over independent data sets, on each of which the metric is defined."""
    if len(parts) == 1:
        return parts[0].interval(name, level)
    estimate = float(np.mean([part.values[name] for part in parts]))
    if name == "ece":
        # All of them hold together with the error shared out; noise is no smaller in the mean of raised estimates.
        each = [part.interval(name, 1 - (1 - level) / len(parts)) for part in parts]
        return Interval(estimate, float(np.mean([i.low for i in each])), float(np.mean([i.high for i in each])))
    if name == _RESAMPLED:
        values = np.mean([part.replicates.values[name] for part in parts], axis=0)
        return shifted_percentiles(estimate, values, level, 0.0)
    if has_interval(name):
        return plain_mean([part.bounded(name) for part in parts]).interval(level)
    return Interval(estimate, math.nan, math.nan)


def average_calibrated(parts: Sequence[Estimates]) -> CalibratedEce:
    """The mean over data sets of what calibrated models show."""
    return mean_calibrated([part.calibrated for part in parts])


def _resampled_mean(
    value: float, replicates: npt.NDArray[np.float64], units: float, *, most: float | None = None, lower: float = 0.0
) -> BoundedMean:
    known = replicates[~np.isnan(replicates)]
    if math.isnan(value) or not len(known) or units <= 0:
        return BoundedMean(math.nan, math.nan, 0.0, lower=lower)
    return BoundedMean(value, float(known.var()), units, most, lower, is_mean=False)
