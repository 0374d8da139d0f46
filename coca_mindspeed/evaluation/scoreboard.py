"""Runs (a label, predictions, training metrics if there are any), and their metrics by data set with intervals.

Category averages follow the paper's rule.
"""

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np

from coca_mindspeed.data.records import CATEGORIES
from coca_mindspeed.errors import DataError
from coca_mindspeed.evaluation.intervals import (
    EceUnderCalibration,
    Estimates,
    Interval,
    average_difference,
    average_interval,
    average_under_calibration,
    paired_intervals,
)
from coca_mindspeed.evaluation.metrics import (
    DEFAULT_OPTIONS,
    METRIC_SPECS,
    CalibrationMetrics,
    MetricOptions,
    round_half_up,
)
from coca_mindspeed.evaluation.predictions import (
    VALIDATIONS,
    Prediction,
    gradable,
    outcomes,
    read_predictions,
    validation_files,
)
from coca_mindspeed.utils.console import print_note
from coca_mindspeed.utils.json_files import read_steps

#: The paper's data sets by category, in its order.
DATASETS = {
    "math": ("gsm8k", "math500", "aime24", "aime25"),
    "code": ("mbpp_sanitized", "humaneval"),
    "factual": ("simpleqa", "triviaqa"),
}


@dataclass(frozen=True, slots=True)
class Run:
    """One row of a report's tables."""

    label: str  # unique within a report
    predictions: Sequence[Prediction]  # of one method and model; may be empty while the run is training
    training: Sequence[Mapping[str, Any]] = ()  # the objects of metrics.jsonl
    method: str | None = None  # as the predictions state it

    def by_dataset(self) -> dict[str, list[Prediction]]:
        """Return the gradable predictions of each data set, data sets in order of appearance."""
        groups: dict[str, list[Prediction]] = {prediction.dataset: [] for prediction in self.predictions}
        for prediction in gradable(self.predictions):
            groups[prediction.dataset].append(prediction)
        return groups

    def ungradable(self) -> dict[str, int]:
        """Return data set -> number of ungradable answers, for the data sets that have any."""
        return dict(Counter(prediction.dataset for prediction in self.predictions if prediction.correct is None))


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
    """Differences of two runs on their common responses (question and sample) of a data set."""

    n: int  # common responses
    first: int  # the runs' numbers of responses
    second: int
    intervals: Mapping[str, Interval]  # by metric


class Scoreboard:
    """Every metric of every run on every data set; runs without predictions are left out."""

    def __init__(self, runs: Sequence[Run], *, options: MetricOptions = DEFAULT_OPTIONS) -> None:
        self.runs = [run for run in runs if run.predictions]
        self.options = options
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
            # Data sets of one size must not share their draws, or averages over them would seem too sure.
            seed=crc32(dataset.encode()),
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


def split_runs(predictions: Sequence[Prediction], name: str) -> list[Run]:
    """Return a run for each (model, method), labelled by them, or by ``name`` where both are unknown."""
    groups: dict[tuple[str | None, str | None], list[Prediction]] = {}
    for prediction in predictions:
        groups.setdefault((prediction.model, prediction.method), []).append(prediction)
    return [
        Run(" ".join(filter(None, (model, method))) or name, rows, method=method)
        for (model, method), rows in groups.items()
    ]


def read_runs(paths: Sequence[Path]) -> list[Run]:
    """Read the runs of prediction files and of run directories (``predictions*.jsonl``, ``metrics.jsonl``).

    A file named ``predictions.jsonl`` is labelled by its directory; ``predictions_after.jsonl`` adds ``after``.

    Raises DataError: a path holds neither predictions nor metrics.
    """
    runs: list[Run] = []
    for path in paths:
        if not path.exists():
            raise DataError(f"{path}: does not exist; expected a predictions file or a run directory")
        files = prediction_files(path) if path.is_dir() else [path]
        metrics = path / "metrics.jsonl"
        training = read_steps(metrics) if path.is_dir() and metrics.exists() else []
        if not files and not training:
            raise DataError(f"{path}: holds neither predictions*.jsonl nor metrics.jsonl")
        found = []
        for file in files:
            label = file_label(file, path)
            own = split_runs(read_predictions(file), label)
            found += own if len(own) > 1 else [replace(own[0], label=label)]
        if training and len(found) == 1:
            found = [replace(found[0], training=training)]
        elif training:
            # With predictions before and after training, the curves belong to neither.
            found.append(Run(path.resolve().name, (), training))
        runs += found
    return unique_labels(runs)


def prediction_files(directory: Path) -> list[Path]:
    """Return the prediction files of a run directory, those from before training first.

    Of a run on a cluster these are the first and the newest validation of each stage; a note names the others' folder.
    """
    files = sorted(directory.glob("predictions*.jsonl"), key=lambda file: (not file.stem.endswith("before"), file.name))
    for folder in sorted([directory / VALIDATIONS, *directory.glob(f"stage[0-9]*/{VALIDATIONS}")]):
        validations = [*validation_files(folder).values()]
        files += validations[:1] + validations[1:][-1:]
        if len(validations) > 2:
            read = f"only the first and the newest of {len(validations)} validations are read; name it to read all"
            print_note(f"note: {folder}: {read}")
    return files


def unique_labels(runs: Sequence[Run]) -> list[Run]:
    """Number the runs that share a label."""
    total, seen, result = Counter(run.label for run in runs), Counter[str](), []
    for run in runs:
        seen[run.label] += 1
        result.append(run if total[run.label] == 1 else replace(run, label=f"{run.label} #{seen[run.label]}"))
    return result


def file_label(file: Path, path: Path) -> str:
    """Return the label of a prediction file; ``path`` is the file, or the run directory that holds it."""
    if not path.is_dir():
        return file.stem if file.stem != "predictions" else file.resolve().parent.name
    stage = [part for part in file.relative_to(path).parent.parts if part != VALIDATIONS]
    return " ".join(filter(None, [path.resolve().name, *stage, file.stem.removeprefix("predictions").strip("_-. ")]))
