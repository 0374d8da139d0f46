"""The finished cells of a reproduction, and what they say over seeds."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import t as student_t

from coca_mindspeed.evaluation.catalogue import UNDEFINED, metric_info, round_half_up, show
from coca_mindspeed.evaluation.intervals import Interval
from coca_mindspeed.files import read_json_lines
from coca_mindspeed.reproduce.cells import Cell


@dataclass(frozen=True)
class Results:
    """What is finished.

    Attributes:
        output: the reproduction's directory.
        summaries: (setting, method, seed) -> the cell's summary.
        unfinished: the cells that are not.
    """

    output: Path
    summaries: dict[tuple[str, str, int], dict[str, Any]]
    cells: dict[tuple[str, str, int], Cell]
    unfinished: Sequence[Cell]

    def seeds(self, setting: str, *methods: str) -> list[int]:
        """Seeds for which all of these methods are finished: what a paired comparison is over."""
        found = {seed for s, _, seed in self.summaries if s == setting}
        return sorted(seed for seed in found if all((setting, m, seed) in self.summaries for m in methods))

    def value(self, setting: str, method: str, seed: int, category: str, metric: str) -> float:
        """A metric in a category: the plain mean over its data sets, undefined ones left out; NaN if all are."""
        datasets = self.summaries[setting, method, seed].get("datasets", {}).values()
        values = [d[metric] for d in datasets if d["category"] == category and d[metric] is not None]
        return float(np.mean(values)) if values else math.nan

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


def collect(output: Path, cells: Sequence[Cell]) -> Results:
    """Read the summaries of the finished cells."""
    finished = [cell for cell in cells if cell.done(output)]
    keyed = {(cell.setting, cell.name, cell.seed): cell for cell in finished}
    summaries = {key: cell.summary(output) for key, cell in keyed.items()}
    return Results(output, summaries, keyed, [cell for cell in cells if not cell.done(output)])


@dataclass(frozen=True)
class Spread:
    """A quantity over seeds: mean, sample deviation (NaN for fewer than two seeds), and the values that are defined."""

    mean: float
    deviation: float
    values: tuple[float, ...]

    def show(self, metric: str) -> str:
        """``0.12 ± 0.01``, as the tables print the metric."""
        if math.isnan(self.mean):
            return UNDEFINED
        if math.isnan(self.deviation):
            return show(metric, self.mean)
        info = metric_info(metric)
        # Four digits of a deviation of 0.004 would be noise; two figures of 0.00 would say nothing.
        return f"{show(metric, self.mean)} ± {round_half_up(self.deviation * info.scale, info.decimals)}"


def spread(values: Sequence[float]) -> Spread:
    """Mean and sample deviation of the values that are not NaN."""
    known = tuple(value for value in values if not math.isnan(value))
    mean = float(np.mean(known)) if known else math.nan
    return Spread(mean, float(np.std(known, ddof=1)) if len(known) > 1 else math.nan, known)


def mean_interval(values: Sequence[float], level: float = 0.95) -> Interval:
    """Student's t interval of the mean; NaN bounds for fewer than two values.

    Of paired differences between two methods over seeds it is the paired t interval: what the seeds share (weights,
    warm-up, questions) cancels.
    """
    of = spread(values)
    n = len(of.values)
    if n < 2:
        return Interval(of.mean, math.nan, math.nan)
    half = float(student_t.ppf(0.5 + level / 2, n - 1)) * of.deviation / math.sqrt(n)
    return Interval(of.mean, of.mean - half, of.mean + half)
