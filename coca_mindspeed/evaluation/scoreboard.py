"""Metrics of runs by data set, with intervals, and category averages by the paper's rule."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from zlib import crc32

import numpy as np

from coca_mindspeed.evaluation.intervals import (
    EceUnderCalibration,
    Estimates,
    Interval,
    average_difference,
    average_interval,
    average_under_calibration,
    paired_intervals,
)
from coca_mindspeed.evaluation.metrics import METRIC_SPECS, CalibrationMetrics, MetricOptions, round_half_up
from coca_mindspeed.evaluation.predictions import CATEGORIES, Prediction, outcomes
from coca_mindspeed.evaluation.runs import Run

#: The paper's data sets by category, in its order.
DATASETS = {
    "math": ("gsm8k", "math500", "aime24", "aime25"),
    "code": ("mbpp_sanitized", "humaneval"),
    "factual": ("simpleqa", "triviaqa"),
}


@dataclass(frozen=True, slots=True)
class Column:
    """A table column: a data set, or the average over a category's data sets."""

    name: str
    datasets: tuple[str, ...]
    is_average: bool

    @property
    def heading(self) -> str:
        return f"{self.name} (mean)" if self.is_average else self.name


@dataclass(frozen=True, slots=True)
class PairedDifference:
    """Differences (metric -> interval) of two runs on their ``n`` common responses of a data set (question and sample).

    ``first`` and ``second`` are the runs' numbers of responses.
    """

    n: int
    first: int
    second: int
    intervals: Mapping[str, Interval]


class Scoreboard:
    """Every metric of every run on every data set; runs without predictions are left out."""

    def __init__(
        self, runs: Sequence[Run], *, replicates: int = 1000, seed: int = 0, options: MetricOptions | None = None
    ) -> None:
        self.runs = [run for run in runs if run.predictions]
        self.options = options or MetricOptions()
        self._replicates, self._seed = replicates, seed
        self._pairs: dict[tuple[str, str, str], tuple[Estimates, Estimates] | None] = {}
        self._cells: dict[tuple[str, str], Estimates] = {}
        stated: dict[str, set[str]] = {}
        for run in self.runs:
            for dataset, predictions in run.by_dataset().items():
                stated.setdefault(dataset, set()).update(p.category for p in predictions if p.category is not None)
                self._cells[run.label, dataset] = self._estimates(predictions, dataset)
        self.metrics: dict[tuple[str, str], CalibrationMetrics] = {
            key: cell.metrics for key, cell in self._cells.items()
        }
        self.columns = _columns({dataset: _category(dataset, found) for dataset, found in stated.items()})

    @property
    def datasets(self) -> list[str]:
        """Data sets, in the order of the tables."""
        return [column.name for column in self.columns if not column.is_average]

    def count(self, run: str, column: Column) -> int:
        """Return the number of predictions of a run in a column."""
        return sum(self.metrics[run, name].n for name in column.datasets if (run, name) in self.metrics)

    def interval(self, run: str, column: Column, metric: str) -> Interval:
        """Return the estimate with its bounds; NaN where undefined or where a run lacks one of the data sets.

        A category's average is the plain mean over its data sets without those where the metric is undefined.
        """
        cells = self._defined(run, column, metric)
        return average_interval(cells, metric) if cells else Interval(math.nan)

    def ece_under_calibration(self, run: str, column: Column) -> EceUnderCalibration | None:
        """Return the ECE under perfect calibration; None where ECE is undefined."""
        cells = self._defined(run, column, "ece")
        return average_under_calibration(cells) if cells else None

    def _defined(self, run: str, column: Column, metric: str) -> list[Estimates]:
        """The estimates behind a figure; empty if the run lacks one of the data sets."""
        cells = [self._cells.get((run, name)) for name in column.datasets]
        if any(cell is None for cell in cells):
            return []
        return [cell for cell in cells if cell is not None and not math.isnan(cell.values[metric])]

    def _estimates(self, predictions: Sequence[Prediction], dataset: str) -> Estimates:
        return Estimates(
            outcomes(predictions),
            questions=np.array([p.id for p in predictions]),
            replicates=self._replicates,
            # Data sets of one size must not share their draws, or averages over them would seem too sure.
            seed=(self._seed << 32) + crc32(dataset.encode()),
            options=self.options,
        )

    def best(self, column: Column, metric: str) -> set[str]:
        """Return the label of the run with the best value in a column, if its paired differences are decided.

        Empty where no direction is better, and where the 95% interval of the difference to another run includes 0 or
        does not exist.
        """
        info = METRIC_SPECS[metric]
        values = {run.label: self.interval(run.label, column, metric).estimate for run in self.runs}
        known = {
            label: round_half_up(value * info.scale, info.decimals) * info.better
            for label, value in values.items()
            if not math.isnan(value)
        }
        if info.better == 0 or len(known) < 2:
            return set()
        best, *others = sorted(known, key=lambda label: known[label], reverse=True)
        return {best} if all(self._is_better(best, other, column, metric) for other in others) else set()

    def _is_better(self, first: str, second: str, column: Column, metric: str) -> bool:
        """Whether the paired interval of ``first - second`` lies on the better side of 0."""
        pairs = [self._paired(second, first, name) for name in column.datasets]
        if None in pairs:
            return False
        interval = average_difference([pair for pair in pairs if pair is not None], metric)
        return bool(interval.low > 0 if METRIC_SPECS[metric].better > 0 else interval.high < 0)

    def _paired(self, first: str, second: str, dataset: str) -> tuple[Estimates, Estimates] | None:
        """The estimates of two of the board's runs on their common responses; None if there are none."""
        if (key := (first, second, dataset)) not in self._pairs:
            runs = {run.label: run for run in self.runs}
            self._pairs[key] = self._on_common(runs[first], runs[second], dataset)
        return self._pairs[key]

    def _on_common(self, first: Run, second: Run, dataset: str) -> tuple[Estimates, Estimates] | None:
        ours, theirs = ({p.key: p for p in run.by_dataset().get(dataset, [])} for run in (first, second))
        if not (shared := [key for key in ours if key in theirs]):
            return None
        before, after = (self._estimates([group[key] for key in shared], dataset) for group in (ours, theirs))
        return before, after

    def difference(self, first: Run, second: Run, dataset: str) -> PairedDifference:
        """Return the differences ``second - first`` on the common responses of a data set."""
        pair = self._on_common(first, second, dataset)
        n, intervals = (0, {}) if pair is None else (len(pair[0].data), paired_intervals(*pair))
        ours, theirs = (len(run.by_dataset().get(dataset, [])) for run in (first, second))
        return PairedDifference(n, ours, theirs, intervals)


def _category(dataset: str, stated: Collection[str]) -> str | None:
    """The category stated by a data set's predictions, or else the paper's; None if they state several."""
    if stated:
        return next(iter(stated)) if len(stated) == 1 else None
    return next((name for name, sets in DATASETS.items() if dataset in sets), None)


def _columns(categories: Mapping[str, str | None]) -> list[Column]:
    """Data sets by category, in the paper's order where it has them, each category followed by its average."""
    order = [name for sets in DATASETS.values() for name in sets]
    datasets = sorted(categories, key=lambda name: (name not in order, order.index(name) if name in order else 0, name))
    known = [*CATEGORIES, *sorted({c for c in categories.values() if c is not None} - set(CATEGORIES))]
    columns = []
    for category in known:
        members = [name for name in datasets if categories[name] == category]
        columns += [Column(name, (name,), False) for name in members]
        if len(members) > 1:
            columns.append(Column(category, tuple(members), True))
    columns += [Column(name, (name,), False) for name in datasets if categories[name] is None]
    return columns
