"""The tables of reports: metrics by run and data set, error by threshold, maps carried from one data set to another."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table as RichTable

from coca_mindspeed.evaluation.calibration.maps import STATED
from coca_mindspeed.evaluation.metrics.calibration import HEADLINE, calibration_metrics
from coca_mindspeed.evaluation.metrics.curves import THRESHOLDS, RiskRow, risk_table
from coca_mindspeed.evaluation.metrics.specs import (
    CALIBRATED_LABEL,
    UNDEFINED,
    metric_info,
    show,
    show_calibrated,
    show_range,
)
from coca_mindspeed.evaluation.predictions import Prediction, outcomes
from coca_mindspeed.evaluation.reports.scoreboard import Column, Scoreboard
from coca_mindspeed.evaluation.runs import Run
from coca_mindspeed.utils.console import PlainConsole, terminal_text
from coca_mindspeed.utils.markdown import markdown_table

_BINNED = ("ece", "mce")


@dataclass(frozen=True, slots=True)
class TableCell:
    """A number as it is printed; ``beside`` is what belongs to it, such as the ECE of a calibrated model."""

    text: str
    interval: str
    best: bool
    reason: str
    beside: str = ""

    def markdown(self) -> str:
        number = f"**{self.text}**" if self.best else self.text
        return f"{number} ({'; '.join(filter(None, (self.interval, self.beside)))})" if self.interval else number


@dataclass(frozen=True, slots=True)
class Heading:
    """A table's column as it is printed; averages stand out."""

    text: str
    is_average: bool = False
    meaning: str = ""


@dataclass(frozen=True, slots=True)
class Table:
    """Numbers; ``rows`` are (label, cells in the order of ``columns``), and ``corner`` heads the labels."""

    name: str
    heading: str
    meaning: str
    columns: Sequence[Heading]
    rows: Sequence[tuple[str, Sequence[TableCell]]]
    corner: str = "run"

    def markdown(self) -> str:
        rows = [(label, *(cell.markdown() for cell in cells)) for label, cells in self.rows]
        return markdown_table(
            [self.corner, *(column.text for column in self.columns)], rows, numbers=range(1, len(self.columns) + 1)
        )


def result_tables(board: Scoreboard, metrics: Sequence[str]) -> list[Table]:
    """A table for each metric with data sets as columns; of a single data set, one table with metrics as columns."""
    if len(board.columns) != 1:
        return [metric_table(board, metric) for metric in metrics]
    [column] = board.columns
    parts = [metric_table(board, metric) for metric in metrics]
    columns = [Heading(part.heading, meaning=part.meaning) for part in parts]
    rows = [
        (run.label, [cell for part in parts for cell in part.rows[index][1]]) for index, run in enumerate(board.runs)
    ]
    binned = [metric_info(metric).label for metric in metrics if metric in _BINNED]
    meaning = f"{' and '.join(binned)}: {board.options.bins_text}" if binned else ""
    return [Table(metrics[0], column.name, meaning, columns, rows)]


def metric_table(board: Scoreboard, metric: str) -> Table:
    """One metric's table, the best of each column marked."""
    info = metric_info(metric)
    best = {column: board.best(column, metric) for column in board.columns}
    rows = [
        (run.label, [_cell(board, run, column, metric, run.label in best[column]) for column in board.columns])
        for run in board.runs
    ]
    columns = [
        Heading(f"{column.name} (mean)" if column.is_average else column.name, column.is_average)
        for column in board.columns
    ]
    how = ", percent" if info.percent else f", {board.options.bins_text}" if metric in _BINNED else ""
    return Table(metric, info.heading, info.meaning + how, columns, rows)


def _cell(board: Scoreboard, run: Run, column: Column, metric: str, is_best: bool) -> TableCell:
    interval = board.interval(run.label, column, metric)
    bounds = show_range(metric, interval.low, interval.high)
    beside = ""
    if metric == "ece" and (found := board.calibrated(run.label, column)) is not None:
        beside = f"{CALIBRATED_LABEL}: {show_calibrated(found.mean, found.high)}"
    return TableCell(show(metric, interval.estimate), bounds, is_best, _reason(board, run, column, metric), beside)


def _reason(board: Scoreboard, run: Run, column: Column, metric: str) -> str:
    """Why a cell is undefined; empty where it is not."""
    if missing := [name for name in column.datasets if (run.label, name) not in board.metrics]:
        return f"no predictions on {', '.join(missing)}"
    reasons = [board.metrics[run.label, name].undefined.get(metric, "") for name in column.datasets]
    return reasons[0] if all(reasons) else ""


def risk_tables(board: Scoreboard) -> list[Table]:
    """Error and coverage of what each threshold accepts, a table for each data set."""
    columns = [Heading(f"≥ {threshold:g}") for threshold in THRESHOLDS]
    meaning = (
        "wrong answers among those of at least that stated confidence, percent, with the exact interval of each "
        "threshold by itself, and the share of all answers that is accepted; `calibrate --risk` certifies a threshold"
    )
    tables = []
    for dataset in board.datasets:
        rows = []
        for run in board.runs:
            data = outcomes(run.by_dataset().get(dataset, []))
            rows.append((run.label, [_risk_cell(row) for row in risk_table(data.confidence, data.correct)]))
        tables.append(Table(f"risk_{dataset}", f"Error by threshold: {dataset}", meaning, columns, rows))
    return tables


def _risk_cell(row: RiskRow) -> TableCell:
    if math.isnan(row.risk):
        return TableCell(UNDEFINED, "", False, "no answer states so high a confidence")
    bounds = f"{row.low * 100:.1f} to {row.high * 100:.1f}"
    return TableCell(f"{row.risk:.1%}", bounds, False, "", f"{row.coverage:.1%} accepted")


def transfer_tables(board: Scoreboard) -> list[Table]:
    """What a recalibration map of one data set is worth on another; a table for each run with several data sets."""
    meaning = (
        f"{metric_info('smooth_ece').label} of each column's answers after the map of each row; on the diagonal no "
        "question is recalibrated by its own label"
    )
    tables = []
    for label, matrix in board.transfers.items():
        columns = [Heading(name) for name in matrix[STATED]]
        rows = [
            (source, [TableCell(show("smooth_ece", value), "", False, _UNFITTED) for value in row.values()])
            for source, row in matrix.items()
        ]
        heading = f"Recalibrated on one, tested on another: {label}"
        tables.append(Table(f"transfer_{label}", heading, meaning, columns, rows, "map fitted on"))
    return tables


_UNFITTED = "undefined where the labels to fit by are all equal, or too few"


def summary_metrics(predictions: Sequence[Prediction]) -> dict[str, Any]:
    """The seven headline metrics of a summary, None where undefined, and how many answers were ``ungradable``."""
    data = outcomes(predictions)
    metrics = calibration_metrics(data.confidence, data.correct, data.tokens_to_confidence)
    return {**metrics.headline(), "ungradable": len(predictions) - len(data)}


def metrics_table(rows: Mapping[str, Mapping[str, Any]], width: int) -> RichTable:
    """A terminal table of several sets of metrics.

    Args:
        rows: name -> metrics.
        width: columns of the terminal.  Where a row for each set would not fit, each set is a column.
    """
    cells = {name: [shown_value(key, metrics[key]) for key in HEADLINE] for name, metrics in rows.items()}
    titles = [column_title(name) for name in HEADLINE]
    wide = RichTable()
    wide.add_column("")
    for title in titles:
        wide.add_column(title, justify="right", no_wrap=True)
    for name, values in cells.items():
        wide.add_row(terminal_text(name), *values)
    if Console(width=10_000).measure(wide).minimum <= width:
        return wide
    tall = RichTable()
    tall.add_column("")
    for name in cells:
        tall.add_column(terminal_text(name), justify="right", no_wrap=True)
    for title, *values in zip(titles, *cells.values(), strict=True):
        tall.add_row(title, *values)
    return tall


def print_metrics(rows: Mapping[str, Mapping[str, Any]]) -> None:
    """Print :func:`metrics_table` on standard output, as wide as it is where that is no terminal."""
    console = PlainConsole()
    console.print(metrics_table(rows, console.width))


def column_title(name: str) -> str:
    """A metric's title, with an arrow to where it is better."""
    return "questions" if name == "n" else metric_info(name).heading


def shown_value(name: str, value: float | None) -> str:
    """A metric's value as people read it; ``--`` where it is undefined."""
    return f"{value:,}" if name == "n" else show(name, value)
