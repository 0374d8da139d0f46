"""The finished cells of a reproduction, and what they say over seeds."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
from scipy.stats import t as student_t

from coca_mindspeed.evaluation.intervals.bounds import Interval
from coca_mindspeed.evaluation.intervals.estimates import Estimates
from coca_mindspeed.evaluation.metrics.specs import UNDEFINED, metric_spec, round_half_up, show
from coca_mindspeed.evaluation.predictions import Prediction, outcomes
from coca_mindspeed.reproduce.cells import ReproductionCell
from coca_mindspeed.utils.files import read_json_lines

_SAME = 1e-12  # floats that differ by no more are the same number


@dataclass(frozen=True)
class Results:
    """What is finished.

    Attributes:
        output: the reproduction's directory.
        summaries: (setting, method, seed) -> the cell's summary.
        cells: (setting, method, seed) -> the cell.
        unfinished: the cells that are not.
    """

    output: Path
    summaries: dict[tuple[str, str, int], dict[str, Any]]
    cells: dict[tuple[str, str, int], ReproductionCell]
    unfinished: Sequence[ReproductionCell]
    _redrawn: dict[tuple[str, str, int], dict[str, float]] = field(default_factory=dict, repr=False)

    def seeds(self, setting: str, *methods: str) -> list[int]:
        """Seeds for which all of these methods are finished: what a paired comparison is over."""
        found = {seed for s, _, seed in self.summaries if s == setting}
        return sorted(seed for seed in found if all((setting, m, seed) in self.summaries for m in methods))

    def asked(self, setting: str, method: str) -> list[int]:
        """Seeds for which the method is asked for, finished or not."""
        finished = [seed for s, m, seed in self.summaries if (s, m) == (setting, method)]
        return sorted({*finished, *(c.seed for c in self.unfinished if (c.setting, c.name) == (setting, method))})

    def value(self, setting: str, method: str, seed: int, category: str, metric: str) -> float:
        """A metric in a category: the plain mean over its data sets, undefined ones left out; NaN if all are."""
        return _mean(self._defined(setting, method, seed, category, metric).values())

    def pair(self, setting: str, method: str, rival: str, seed: int, category: str, metric: str) -> tuple[float, float]:
        """The metric of both, over the data sets on which both have one: a mean over others is not comparable."""
        ours, theirs = (self._defined(setting, m, seed, category, metric) for m in (method, rival))
        both = ours.keys() & theirs.keys()
        return _mean([ours[name] for name in sorted(both)]), _mean([theirs[name] for name in sorted(both)])

    def _defined(self, setting: str, method: str, seed: int, category: str, metric: str) -> dict[str, float]:
        """Data set -> the metric, where it is defined."""
        datasets = self.summaries[setting, method, seed].get("datasets", {})
        return {name: d[metric] for name, d in datasets.items() if d["category"] == category and d[metric] is not None}

    def calibrated_ece(self, setting: str, method: str, seed: int, category: str) -> float:
        """The mean ECE that a calibrated model with this cell's confidences would show, averaged like :meth:`value`.

        Redrawn from the predictions, so that cells which were finished before it was asked for have it as well.
        """
        found = self._calibrated(setting, method, seed)
        datasets = self.summaries[setting, method, seed].get("datasets", {})
        asked = [found.get(name, math.nan) for name, d in datasets.items() if d["category"] == category]
        defined = [value for value in asked if not math.isnan(value)]
        return float(np.mean(defined)) if defined else math.nan

    def _calibrated(self, setting: str, method: str, seed: int) -> dict[str, float]:
        """Data set -> mean ECE of redrawn answers."""
        key = (setting, method, seed)
        if key not in self._redrawn:
            by_dataset: dict[str, list[Prediction]] = {}
            for prediction in self.cells[key].predictions(self.output):
                by_dataset.setdefault(prediction.dataset, []).append(prediction)
            self._redrawn[key] = {
                name: Estimates(outcomes(rows), seed=crc32(name.encode())).calibrated.mean
                for name, rows in by_dataset.items()
            }
        return self._redrawn[key]

    def categories(self, setting: str) -> list[str]:
        """Categories that the setting's cells have, in the order of their data."""
        found: dict[str, None] = {}
        for (name, _, _), summary in self.summaries.items():
            if name == setting:
                found.update(dict.fromkeys(d["category"] for d in summary.get("datasets", {}).values()))
        return list(found)

    def training_rows(self, setting: str, method: str, seed: int) -> list[dict[str, Any]]:
        """The rows of a trained cell's metrics.jsonl."""
        directory = self.cells[setting, method, seed].directory(self.output)
        return [row for _, row in read_json_lines(directory / "run" / "metrics.jsonl")]


def collect(output: Path, cells: Sequence[ReproductionCell]) -> Results:
    """Read the summaries of the finished cells."""
    finished = [cell for cell in cells if cell.done(output)]
    keyed = {(cell.setting, cell.name, cell.seed): cell for cell in finished}
    summaries = {key: cell.summary(output) for key, cell in keyed.items()}
    return Results(output, summaries, keyed, [cell for cell in cells if not cell.done(output)])


@dataclass(frozen=True)
class Spread:
    """A quantity over seeds.

    Attributes:
        mean: over the seeds where it is defined, NaN where it is for none.
        deviation: sample deviation, NaN for fewer than two.
        values: the defined ones.
        seeds: for how many seeds it was asked.
    """

    mean: float
    deviation: float
    values: tuple[float, ...]
    seeds: int

    def show(self, metric: str) -> str:
        """``0.120 ± 0.013``, as the tables print the metric; ``(n = 4)`` behind it where seeds are missing."""
        if math.isnan(self.mean):
            return UNDEFINED
        few = "" if len(self.values) == self.seeds else f" (n = {len(self.values)})"
        if math.isnan(self.deviation):
            return show(metric, self.mean) + few
        info = metric_spec(metric)
        return f"{show(metric, self.mean)} ± {round_half_up(self.deviation * info.scale, info.decimals)}{few}"


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return float(np.mean(found)) if found else math.nan


def spread(values: Sequence[float]) -> Spread:
    """Mean and sample deviation of the values that are not NaN."""
    known = tuple(value for value in values if not math.isnan(value))
    mean = float(np.mean(known)) if known else math.nan
    return Spread(mean, float(np.std(known, ddof=1)) if len(known) > 1 else math.nan, known, len(values))


def mean_interval(values: Sequence[float], level: float = 0.95, *, exact: bool = False) -> Interval:
    """Student's t interval of the mean; NaN bounds for fewer than two values, and where all are the same.

    Of paired differences between two methods over seeds it is the paired t interval: what the seeds share (weights,
    warm-up, questions) cancels.

    Args:
        values: one for each seed.
        level: of confidence.
        exact: values that agree do so because they cannot differ, and not by chance: the interval is a point then.
    """
    of = spread(values)
    n = len(of.values)
    if n < 2 or (not exact and _agree(of)):
        return Interval(of.mean, math.nan, math.nan)
    half = float(student_t.ppf(0.5 + level / 2, n - 1)) * of.deviation / math.sqrt(n)
    return Interval(of.mean, of.mean - half, of.mean + half)


def mean_differs(values: Sequence[float], bound: float, *, exact: bool = False) -> float:
    """Two-sided p of Student's t test that the mean is ``bound``; NaN for fewer than two values.

    Values that all agree have no spread to judge the mean by, as accuracies of a few seeds may by chance: they are
    shares of whole questions.  Their p is NaN, unless they are ``exact``; see :func:`mean_interval`.
    """
    of = spread(values)
    n = len(of.values)
    if n < 2:
        return math.nan
    if _agree(of):
        if not exact:
            return math.nan
        return 0.0 if abs(of.mean - bound) > _SAME else 1.0
    return float(2 * student_t.sf(abs(of.mean - bound) / of.deviation * math.sqrt(n), n - 1))


def _agree(of: Spread) -> bool:
    """Whether the values are the same but for the rounding of floats."""
    return of.deviation <= _SAME * max(abs(of.mean), 1.0)


def holm(p_values: Sequence[float]) -> list[float]:
    """Each p corrected for how many there are (Holm, 1979); NaN stays and is not counted.

    Judged at 5%, all verdicts together are wrong at most once in twenty times.
    """
    corrected = [math.nan] * len(p_values)
    order = sorted((i for i, p in enumerate(p_values) if not math.isnan(p)), key=lambda i: p_values[i])
    largest = 0.0
    for place, i in enumerate(order):
        largest = max(largest, min(1.0, p_values[i] * (len(order) - place)))
        corrected[i] = largest
    return corrected
