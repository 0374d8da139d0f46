"""Tables of reports and of the terminal: metrics, error by threshold."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from rich.table import Column as RichColumn
from rich.table import Table as RichTable

from coca_mindspeed.evaluation.binning import THRESHOLDS, risk_table
from coca_mindspeed.evaluation.metrics import (
    HEADLINE,
    HEADLINE_METRICS,
    METRIC_SPECS,
    UNDEFINED,
    UNDER_CALIBRATION_LABEL,
    calibration_metrics,
    show,
    show_range,
    show_under_calibration,
)
from coca_mindspeed.evaluation.predictions import Prediction, outcomes
from coca_mindspeed.evaluation.runs import Run
from coca_mindspeed.evaluation.scoreboard import Column, Scoreboard
from coca_mindspeed.utils.console import PlainConsole, markdown_table, one_line

_BINNED = ("ece", "mce")


@dataclass(frozen=True, slots=True)
class TableCell:
    """A printed number; ``beside`` holds a related one, such as the ECE under perfect calibration."""

    text: str
    interval: str = ""
    best: bool = False
    reason: str = ""
    beside: str = ""

    def markdown(self) -> str:
        number = f"**{self.text}**" if self.best else self.text
        return f"{number} ({'; '.join(filter(None, (self.interval, self.beside)))})" if self.interval else number


@dataclass(frozen=True, slots=True)
class Heading:
    """A table column's heading; averages are highlighted."""

    text: str
    is_average: bool = False
    meaning: str = ""


@dataclass(frozen=True, slots=True)
class Table:
    """A table of numbers; ``rows`` are (run, cells in the order of ``columns``)."""

    name: str
    heading: str
    meaning: str
    columns: Sequence[Heading]
    rows: Sequence[tuple[str, Sequence[TableCell]]]

    def markdown(self) -> str:
        header = ["run", *(column.text for column in self.columns)]
        rows = [(label, *(cell.markdown() for cell in cells)) for label, cells in self.rows]
        return markdown_table(header, rows, numbers=range(1, len(header)))


def result_tables(board: Scoreboard, metrics: Sequence[str]) -> list[Table]:
    """Return a table per metric with data sets as columns; for a single data set, one table with metrics as columns."""
    tables = [_metric_table(board, metric) for metric in metrics]
    if len(board.columns) != 1:
        return tables
    columns = [Heading(table.heading, meaning=table.meaning) for table in tables]
    rows = [
        (run.label, [cell for table in tables for cell in table.rows[index][1]]) for index, run in enumerate(board.runs)
    ]
    binned = [METRIC_SPECS[metric].label for metric in metrics if metric in _BINNED]
    meaning = f"{' and '.join(binned)}: {board.options.bins_text}" if binned else ""
    return [Table(metrics[0], board.columns[0].name, meaning, columns, rows)]


def _metric_table(board: Scoreboard, metric: str) -> Table:
    """Return one metric's table, with the best of each column marked."""
    spec = METRIC_SPECS[metric]
    columns = [Heading(column.heading, column.is_average) for column in board.columns]
    best = {column: board.best(column, metric) for column in board.columns}
    rows = [
        (run.label, [_cell(board, run, column, metric, run.label in best[column]) for column in board.columns])
        for run in board.runs
    ]
    how = ", percent" if spec.percent else f", {board.options.bins_text}" if metric in _BINNED else ""
    return Table(metric, spec.heading, spec.meaning + how, columns, rows)


def _cell(board: Scoreboard, run: Run, column: Column, metric: str, is_best: bool) -> TableCell:
    interval = board.interval(run.label, column, metric)
    beside = under_calibration(board, run, column) if metric == "ece" else ""
    return TableCell(
        show(metric, interval.estimate),
        show_range(metric, interval.low, interval.high),
        is_best,
        _reason(board, run, column, metric),
        beside and f"{UNDER_CALIBRATION_LABEL}: {beside}",
    )


def under_calibration(board: Scoreboard, run: Run, column: Column) -> str:
    found = board.ece_under_calibration(run.label, column)
    return "" if found is None else show_under_calibration(found.mean, found.high)


def _reason(board: Scoreboard, run: Run, column: Column, metric: str) -> str:
    """Why a cell is undefined; empty if it is defined."""
    if missing := [name for name in column.datasets if (run.label, name) not in board.metrics]:
        return f"no predictions on {', '.join(missing)}"
    reasons = [board.metrics[run.label, name].undefined.get(metric, "") for name in column.datasets]
    return reasons[0] if all(reasons) else ""


def summary_table(board: Scoreboard) -> str:
    """Return the headline metrics in Markdown, a row for each run and column of the board."""
    rows = []
    for run, column in product(board.runs, board.columns):
        intervals = {metric: board.interval(run.label, column, metric) for metric in HEADLINE_METRICS}
        bounds = show_range("ece", intervals["ece"].low, intervals["ece"].high)
        shown = [show(metric, interval.estimate) for metric, interval in intervals.items()]
        shown += [bounds or UNDEFINED, under_calibration(board, run, column) or UNDEFINED]
        rows.append([run.label, column.heading, board.count(run.label, column), *shown])
    labels = [METRIC_SPECS[metric].heading for metric in HEADLINE_METRICS]
    return markdown_table(["run", "data", "n", *labels, "95% interval of ECE", UNDER_CALIBRATION_LABEL], rows)


_FEWEST_LABELS = 100


def not_shown_usable(board: Scoreboard) -> str:
    """A line for each run and data set whose confidence is not shown to separate right from wrong answers."""
    text = ""
    for run, column in product(board.runs, board.columns):
        if column.is_average or not (count := board.count(run.label, column)):
            continue
        interval = board.interval(run.label, column, "auroc")
        few = f"{count} labels are fewer than {_FEWEST_LABELS}"
        reasons = [few] if count < _FEWEST_LABELS else []
        if not interval.low > 0.5:
            bounds = show_range("auroc", interval.low, interval.high)
            reasons.append(f"the 95% interval of AUROC, {bounds}, is not above 0.5" if bounds else "AUROC is undefined")
        if reasons:
            where = one_line(f"{run.label}, {column.heading}")
            text += f"\n{where}: the confidence is not shown to be usable: {' and '.join(reasons)}.\n"
    return text


def risk_tables(board: Scoreboard) -> list[Table]:
    """Return, for each data set, error and coverage of accepting from each threshold on."""
    columns = [Heading(f"≥ {threshold:g}") for threshold in THRESHOLDS]
    meaning = (
        "error rate, percent, of the answers with at least this stated confidence, the exact 95% interval of a single "
        "threshold, and the fraction of all answers accepted; `coca-router calibrate --risk` certifies a threshold"
    )
    tables = []
    for dataset in board.datasets:
        rows = []
        for run in board.runs:
            data = outcomes(run.by_dataset().get(dataset, []))
            cells = [
                TableCell(UNDEFINED, reason="no answer states so high a confidence")
                if math.isnan(risk)
                else TableCell(f"{risk:.1%}", f"{low * 100:.1f} to {high * 100:.1f}", beside=f"{coverage:.1%} accepted")
                for _, _, coverage, risk, low, high in risk_table(data.confidence, data.correct)
            ]
            rows.append((run.label, cells))
        tables.append(Table(f"risk_{dataset}", f"Error by threshold: {dataset}", meaning, columns, rows))
    return tables


def summary_metrics(predictions: Sequence[Prediction]) -> dict[str, Any]:
    """Return the headline metrics, None where undefined, and the number of ``ungradable`` answers."""
    data = outcomes(predictions)
    metrics = calibration_metrics(data.confidence, data.correct, data.tokens_to_confidence)
    return {**metrics.headline(), "ungradable": len(predictions) - len(data)}


def print_metrics(rows: Mapping[str, Mapping[str, Any]]) -> None:
    """Print a table of metrics by name on standard output."""
    table = RichTable("", *(RichColumn(column_title(name), justify="right") for name in HEADLINE))
    for label, metrics in rows.items():
        table.add_row(label, *(shown_value(key, metrics[key]) for key in HEADLINE))
    PlainConsole().print_table(table)


def column_title(name: str) -> str:
    """Return a metric's title, with an arrow in the better direction."""
    return "questions" if name == "n" else METRIC_SPECS[name].heading


def shown_value(name: str, value: float | None) -> str:
    return f"{value:,}" if name == "n" else show(name, value)
