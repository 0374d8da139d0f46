"""Bootstrap intervals of the metrics, and of the difference between two methods on the same questions.

Questions are drawn with replacement, each with all of its samples.  A replicate is a vector of whole-number weights,
so no prediction is copied, and many replicates are computed at once.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from coca_mindspeed.evaluation.catalogue import metric_info
from coca_mindspeed.evaluation.metrics import metrics_of
from coca_mindspeed.evaluation.predictions import Outcomes
from coca_mindspeed.evaluation.weighted import Floats, MetricOptions, WeightedSample

# Weights computed at once: replicates times predictions.  Larger blocks leave the processor's cache.
_BLOCK = 1 << 16


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


@dataclass(frozen=True, slots=True)
class Replicates:
    """Every metric, estimated and resampled.

    Attributes:
        estimates: metric -> its value on the predictions.
        values: metric -> its value on each replicate (r,), NaN where that replicate leaves it undefined.
    """

    estimates: Mapping[str, float]
    values: Mapping[str, Floats]

    def interval(self, name: str, level: float = 0.95) -> Interval:
        """The interval of a metric, within its range."""
        upper = metric_info(name).upper
        return shifted_percentiles(self.estimates[name], self.values[name], level, 0.0, upper)


def shifted_percentiles(
    estimate: float, values: Floats, level: float = 0.95, lower: float = -math.inf, upper: float = math.inf
) -> Interval:
    """Percentiles of the replicates, moved so that their mean falls on the estimate.

    Resampling adds noise to each bin, so replicates of ECE lie above the estimate, on small sets by so much that
    plain percentiles need not even contain it.  The shift takes this bias off; for metrics without it (accuracy,
    AUROC, Brier) it is next to nothing.

    Args:
        estimate: on the data.
        values: replicates (r,); undefined ones (NaN) are left out.
        level: two-sided.
        lower: bounds are clipped to [lower, upper].
        upper: see ``lower``.
    """
    known = values[~np.isnan(values)]
    if math.isnan(estimate) or not len(known):
        return Interval(estimate, math.nan, math.nan)
    tail = (1 - level) / 2
    low, high = np.quantile(known, [tail, 1 - tail]) + (estimate - known.mean())
    return Interval(estimate, float(np.clip(low, lower, estimate)), float(np.clip(high, estimate, upper)))


def _draws(units: int, replicates: int, rows: int, rng: np.random.Generator) -> Iterator[Floats]:
    """Blocks of bootstrap weights (r, units), each row a draw of ``units`` out of ``units`` with replacement."""
    size = max(1, _BLOCK // max(rows, 1))
    for start in range(0, replicates, size):
        count = min(size, replicates - start)
        drawn = rng.integers(0, units, size=(count, units))
        drawn += np.arange(count)[:, None] * units
        yield np.bincount(drawn.ravel(), minlength=count * units).reshape(count, units).astype(np.float64)


def _units(questions: npt.NDArray[Any] | None, rows: int) -> tuple[int, npt.NDArray[np.intp] | None]:
    """How many questions there are, and each row's question; None where every row is its own."""
    if questions is None:
        return rows, None
    if len(questions) != rows:
        raise ValueError(f"questions should have length {rows}, found {len(questions)}")
    unique, index = np.unique(questions, return_inverse=True)
    return len(unique), None if len(unique) == rows else index


def _resample(
    samples: list[WeightedSample], questions: npt.NDArray[Any] | None, replicates: int, seed: int
) -> list[dict[str, Floats]]:
    """Replicates of every sample; the samples' predictions correspond and get the same draws."""
    if replicates < 1:
        raise ValueError(f"replicates should be at least 1, found {replicates}")
    rows = samples[0].n
    count, index = _units(questions, rows)
    blocks: list[list[dict[str, Floats]]] = [[] for _ in samples]
    if rows:
        for weights in _draws(count, replicates, rows, np.random.default_rng(seed)):
            row_weights = weights if index is None else weights[:, index]
            for sample, done in zip(samples, blocks, strict=True):
                # Draws are exchangeable, so a lone sample takes them as they come, in its own order.
                in_order = len(samples) == 1 and index is None
                done.append(sample.metrics(row_weights if in_order else row_weights[:, sample.order]))
    else:
        for sample, done in zip(samples, blocks, strict=True):
            done.append(sample.metrics(np.ones((replicates, 0))))
    return [{name: np.concatenate([block[name] for block in done]) for name in done[0]} for done in blocks]


def bootstrap(
    data: Outcomes,
    *,
    questions: npt.NDArray[Any] | None = None,
    replicates: int = 1000,
    seed: int = 0,
    options: MetricOptions | None = None,
) -> Replicates:
    """Resample n predictions.

    Args:
        data: the predictions' arrays.
        questions: (n,), equal for samples of the same question; None where every prediction is of its own.
        replicates: how many.
        seed: equal seeds give equal replicates.
        options: of the metrics.  Equal-mass bins are those of the data in every replicate.
    """
    sample = _sample(data, options)
    [values] = _resample([sample], questions, replicates, seed)
    return Replicates(metrics_of(sample).values(), values)


def paired_bootstrap(
    first: Outcomes,
    second: Outcomes,
    *,
    questions: npt.NDArray[Any] | None = None,
    replicates: int = 1000,
    seed: int = 0,
    options: MetricOptions | None = None,
) -> dict[str, Interval]:
    """Intervals of ``second - first`` for each metric, both resampled with the same draws.

    Args:
        first: n predictions.
        second: n predictions of another method, in the order of ``first``: row i is of the same question.
        questions: as in :func:`bootstrap`.
        replicates: how many.
        seed: equal seeds give equal intervals.
        options: of the metrics.
    """
    if len(first) != len(second):
        raise ValueError(f"paired predictions should have one length, found {len(first)} and {len(second)}")
    samples = [_sample(first, options), _sample(second, options)]
    before, after = _resample(samples, questions, replicates, seed)
    start, end = (metrics_of(sample).values() for sample in samples)
    return {name: shifted_percentiles(end[name] - start[name], after[name] - before[name]) for name in start}


def _sample(data: Outcomes, options: MetricOptions | None) -> WeightedSample:
    return WeightedSample(data.confidence, data.correct, data.tokens_to_confidence, options or MetricOptions())
