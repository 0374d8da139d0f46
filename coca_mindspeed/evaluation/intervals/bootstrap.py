"""The bootstrap: every metric on questions drawn again and again.

Questions are drawn with replacement, each with all of its samples.  A replicate is a vector of whole-number weights,
so no prediction is copied, and many replicates are computed at once.  Which metrics take their interval from here, and
why ECE does not, is decided in :mod:`.estimates`.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from coca_mindspeed.evaluation.intervals.bounds import Interval
from coca_mindspeed.evaluation.metrics.specs import metric_info
from coca_mindspeed.evaluation.metrics.weighted import Floats, WeightedSample

# Weights computed at once: replicates times predictions.  Larger blocks leave the processor's cache.
_BLOCK = 1 << 16


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
        """Percentiles of a metric without bias, within its range."""
        upper = metric_info(name).upper
        return shifted_percentiles(self.estimates[name], self.values[name], level, 0.0, upper)


def shifted_percentiles(
    estimate: float, values: Floats, level: float = 0.95, lower: float = -math.inf, upper: float = math.inf
) -> Interval:
    """Percentiles of the replicates, moved so that their mean falls on the estimate.

    For a metric without bias the shift is next to nothing.  It is no cure for ECE, whose estimate is itself above the
    true error by about as much as its replicates are above the estimate.

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


def resample(
    samples: list[WeightedSample], question: npt.NDArray[np.intp], replicates: int, seed: int
) -> list[dict[str, Floats]]:
    """Replicates of every sample; all samples get the same draws of questions.

    Args:
        samples: whose predictions correspond, row by row.
        question: of each row (n,), from 0.
        replicates: how many.
        seed: equal seeds give equal replicates.
    """
    if replicates < 1:
        raise ValueError(f"replicates should be at least 1, found {replicates}")
    rows, count = samples[0].n, int(question.max(initial=-1)) + 1
    blocks: list[list[dict[str, Floats]]] = [[] for _ in samples]
    # Draws are exchangeable, so a lone sample of lone answers takes them as they come, in its own order.
    in_order = len(samples) == 1 and count == rows
    if not rows:
        return [sample.metrics(np.ones((replicates, 0))) for sample in samples]
    for weights in _draws(count, replicates, rows, np.random.default_rng(seed)):
        for sample, done in zip(samples, blocks, strict=True):
            done.append(sample.metrics(weights if in_order else weights[:, question[sample.order]]))
    return [{name: np.concatenate([block[name] for block in done]) for name in done[0]} for done in blocks]
