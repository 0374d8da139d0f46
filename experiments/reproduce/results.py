"""The finished jobs of a reproduction, and statistics over seeds."""

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
from scipy.stats import t as student_t

from coca_mindspeed.evaluation.intervals import Estimates, Interval
from coca_mindspeed.evaluation.metrics import METRIC_SPECS, UNDEFINED, round_half_up, show
from coca_mindspeed.evaluation.predictions import Prediction, outcomes
from coca_mindspeed.utils.json_files import read_json_lines
from experiments.reproduce.plan import Job

_EPSILON = 1e-12  # differences up to this are rounding


@dataclass(frozen=True)
class Results:
    """Finished jobs.

    Attributes:
        output: directory of the reproduction.
        summaries: (setting, method, seed) -> summary.
        jobs: (setting, method, seed) -> job.
        unfinished: the other jobs.
    """

    output: Path
    summaries: dict[tuple[str, str, int], dict[str, Any]]
    jobs: dict[tuple[str, str, int], Job]
    unfinished: Sequence[Job]

    def seeds(self, setting: str, *methods: str) -> list[int]:
        """Seeds for which all of these methods are finished."""
        found = {seed for s, _, seed in self.summaries if s == setting}
        return sorted(seed for seed in found if all((setting, m, seed) in self.summaries for m in methods))

    def requested_seeds(self, setting: str, method: str) -> list[int]:
        """Seeds of the method's jobs, finished or not."""
        unfinished = [(job.setting, job.name, job.seed) for job in self.unfinished]
        return sorted({seed for s, m, seed in (*self.summaries, *unfinished) if (s, m) == (setting, method)})

    def value(self, setting: str, method: str, seed: int, category: str, metric: str) -> float:
        """Mean of a metric over the data sets of a category on which it is defined; NaN if there are none."""
        return _mean(self._by_dataset(setting, method, seed, category, metric).values())

    def pair(self, setting: str, method: str, rival: str, seed: int, category: str, metric: str) -> tuple[float, float]:
        """Means of both methods over the data sets on which both have the metric."""
        ours, theirs = (self._by_dataset(setting, m, seed, category, metric) for m in (method, rival))
        both = sorted(ours.keys() & theirs.keys())
        return _mean(ours[name] for name in both), _mean(theirs[name] for name in both)

    def _by_dataset(self, setting: str, method: str, seed: int, category: str, metric: str) -> dict[str, float]:
        datasets = self.summaries[setting, method, seed].get("datasets", {})
        return {name: d[metric] for name, d in datasets.items() if d["category"] == category and d[metric] is not None}

    def calibrated_ece(self, setting: str, method: str, seed: int, category: str) -> float:
        """Mean ECE under perfect calibration with this job's confidences, averaged like :meth:`value`."""
        found = _calibrated_by_dataset(self.jobs[setting, method, seed], self.output)
        datasets = self.summaries[setting, method, seed].get("datasets", {})
        values = (found.get(name, math.nan) for name, d in datasets.items() if d["category"] == category)
        return _mean(value for value in values if not math.isnan(value))

    def categories(self, setting: str) -> list[str]:
        """The setting's categories in the order of its data."""
        summaries = [summary for (name, _, _), summary in self.summaries.items() if name == setting]
        return list(dict.fromkeys(d["category"] for s in summaries for d in s.get("datasets", {}).values()))

    def training_rows(self, setting: str, method: str, seed: int) -> list[dict[str, Any]]:
        """The rows of a trained job's metrics.jsonl."""
        directory = self.jobs[setting, method, seed].directory(self.output)
        return [row for _, row in read_json_lines(directory / "run" / "metrics.jsonl")]


@functools.cache
def _calibrated_by_dataset(job: Job, output: Path) -> dict[str, float]:
    by_dataset: dict[str, list[Prediction]] = {}
    for prediction in job.predictions(output):
        by_dataset.setdefault(prediction.dataset, []).append(prediction)
    return {
        name: Estimates(outcomes(rows), seed=crc32(name.encode())).calibrated.mean for name, rows in by_dataset.items()
    }


def collect(output: Path, jobs: Sequence[Job]) -> Results:
    """Read the summaries of the finished jobs."""
    finished = {(job.setting, job.name, job.seed): job for job in jobs if job.done(output)}
    summaries = {key: job.summary(output) for key, job in finished.items()}
    return Results(output, summaries, finished, [job for job in jobs if not job.done(output)])


@dataclass(frozen=True)
class Spread:
    """A quantity over seeds.

    Attributes:
        mean: of the defined values; NaN without any.
        deviation: sample deviation; NaN for fewer than two.
        values: the defined values.
        seeds: number of seeds, including undefined ones.
    """

    mean: float
    deviation: float
    values: tuple[float, ...]
    seeds: int

    def show(self, metric: str) -> str:
        """``0.120 ± 0.013``, with ``(n = 4)`` if seeds are missing."""
        if math.isnan(self.mean):
            return UNDEFINED
        few = "" if len(self.values) == self.seeds else f" (n = {len(self.values)})"
        if math.isnan(self.deviation):
            return show(metric, self.mean) + few
        info = METRIC_SPECS[metric]
        return f"{show(metric, self.mean)} ± {round_half_up(self.deviation * info.scale, info.decimals)}{few}"

    @property
    def all_equal(self) -> bool:
        """Whether the values are equal up to rounding."""
        return self.deviation <= _EPSILON * max(abs(self.mean), 1.0)


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return float(np.mean(found)) if found else math.nan


def spread(values: Iterable[float]) -> Spread:
    """Mean and sample deviation of the values that are not NaN."""
    found = list(values)
    known = tuple(value for value in found if not math.isnan(value))
    return Spread(_mean(known), float(np.std(known, ddof=1)) if len(known) > 1 else math.nan, known, len(found))


def mean_interval(values: Sequence[float], level: float = 0.95, *, exact: bool = False) -> Interval:
    """Student's t interval of the mean; of paired differences, the paired t interval.

    The bounds are NaN for fewer than two values, and if all are equal.

    Args:
        values: one per seed.
        level: of confidence.
        exact: equal values are no coincidence (as token counts); their interval is a point.
    """
    of = spread(values)
    n = len(of.values)
    if n < 2 or (not exact and of.all_equal):
        return Interval(of.mean, math.nan, math.nan)
    half = float(student_t.ppf(0.5 + level / 2, n - 1)) * of.deviation / math.sqrt(n)
    return Interval(of.mean, of.mean - half, of.mean + half)


def mean_differs(values: Sequence[float], bound: float, *, exact: bool = False) -> float:
    """Two-sided p of Student's t test that the mean is ``bound``.

    NaN for fewer than two values and, unless ``exact``, for equal values: accuracies of a few seeds may be equal by
    chance.
    """
    of = spread(values)
    n = len(of.values)
    if n < 2 or (not exact and of.all_equal):
        return math.nan
    if of.all_equal:
        return float(abs(of.mean - bound) <= _EPSILON)
    return float(2 * student_t.sf(abs(of.mean - bound) / of.deviation * math.sqrt(n), n - 1))


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's (1979) correction of p values; NaN is kept and not counted."""
    corrected = [math.nan] * len(p_values)
    order = sorted((i for i, p in enumerate(p_values) if not math.isnan(p)), key=lambda i: p_values[i])
    largest = 0.0
    for rank, i in enumerate(order):
        largest = max(largest, min(1.0, (len(order) - rank) * p_values[i]))
        corrected[i] = largest
    return corrected
