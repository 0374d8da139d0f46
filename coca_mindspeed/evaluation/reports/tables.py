"""Tables of reports and of the terminal: metrics by run and data set, error by threshold, transfer of maps."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Column as RichColumn
from rich.table import Table as RichTable

from coca_mindspeed.evaluation.calibration_maps import STATED
from coca_mindspeed.evaluation.metrics import specs
from coca_mindspeed.evaluation.metrics.binning import THRESHOLDS, RiskRow, risk_table
from coca_mindspeed.evaluation.metrics.calibration import HEADLINE, calibration_metrics
from coca_mindspeed.evaluation.predictions import Prediction, outcomes
from coca_mindspeed.evaluation.reports.scoreboard import Column, Scoreboard
from coca_mindspeed.evaluation.runs import Run
from coca_mindspeed.utils.console import PlainConsole
from coca_mindspeed.utils.markdown import markdown_table

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
    """A table of numbers; ``rows`` are (label, cells in the order of ``columns``), and ``corner`` heads the labels."""

    name: str
    heading: str
    meaning: str
    columns: Sequence[Heading]
    rows: Sequence[tuple[str, Sequence[TableCell]]]
    corner: str = "run"

    def markdown(self) -> str:
        header = [self.corner, *(column.text for column in self.columns)]
        rows = [(label, *(cell.markdown() for cell in cells)) for label, cells in self.rows]
        return markdown_table(header, rows, numbers=range(1, len(header)))


def result_tables(board: Scoreboard, metrics: Sequence[str]) -> list[Table]:
    """Return a table per metric with data sets as columns; for a single data set, one table with metrics as columns."""
    tables = [metric_table(board, metric) for metric in metrics]
    if len(board.columns) != 1:
        return tables
    columns = [Heading(table.heading, meaning=table.meaning) for table in tables]
    rows = [
        (run.label, [cell for table in tables for cell in table.rows[index][1]]) for index, run in enumerate(board.runs)
    ]
    binned = [specs.metric_spec(metric).label for metric in metrics if metric in _BINNED]
    meaning = f"{' and '.join(binned)}: {board.options.bins_text}" if binned else ""
    return [Table(metrics[0], board.columns[0].name, meaning, columns, rows)]


def metric_table(board: Scoreboard, metric: str) -> Table:
    """Return one metric's table, with the best of each column marked."""
    info = specs.metric_spec(metric)
    best = {column: board.best(column, metric) for column in board.columns}
    rows = [
        (run.label, [_cell(board, run, column, metric, run.label in best[column]) for column in board.columns])
        for run in board.runs
    ]
    columns = [Heading(column.heading, column.is_average) for column in board.columns]
    how = ", percent" if info.percent else f", {board.options.bins_text}" if metric in _BINNED else ""
    return Table(metric, info.heading, info.meaning + how, columns, rows)


def _cell(board: Scoreboard, run: Run, column: Column, metric: str, is_best: bool) -> TableCell:
    interval = board.interval(run.label, column, metric)
    bounds = specs.show_range(metric, interval.low, interval.high)
    beside = ""
    if metric == "ece" and (found := board.ece_under_calibration(run.label, column)) is not None:
        beside = f"{specs.UNDER_CALIBRATION_LABEL}: {specs.show_under_calibration(found.mean, found.high)}"
    return TableCell(
        specs.show(metric, interval.estimate), bounds, is_best, _reason(board, run, column, metric), beside
    )


def _reason(board: Scoreboard, run: Run, column: Column, metric: str) -> str:
    """Why a cell is undefined; empty if it is defined."""
    if missing := [name for name in column.datasets if (run.label, name) not in board.metrics]:
        return f"no predictions on {', '.join(missing)}"
    reasons = [board.metrics[run.label, name].undefined.get(metric, "") for name in column.datasets]
    return reasons[0] if all(reasons) else ""


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
            rows.append((run.label, [_risk_cell(row) for row in risk_table(data.confidence, data.correct)]))
        tables.append(Table(f"risk_{dataset}", f"Error by threshold: {dataset}", meaning, columns, rows))
    return tables


def _risk_cell(row: RiskRow) -> TableCell:
    if math.isnan(row.risk):
        return TableCell(specs.UNDEFINED, reason="no answer states so high a confidence")
    bounds = f"{row.low * 100:.1f} to {row.high * 100:.1f}"
    return TableCell(f"{row.risk:.1%}", bounds, beside=f"{row.coverage:.1%} accepted")


def transfer_tables(board: Scoreboard) -> list[Table]:
    """Return, for each run with several data sets, the error of each data set's recalibration map on the others."""
    meaning = (
        f"{specs.metric_spec('smooth_ece').label} on each column's answers with the recalibration map of each row; the "
        "diagonal is cross-fitted by question"
    )
    reason = "undefined: all labels are equal, or there are too few"
    tables = []
    for label, matrix in board.transfers.items():
        columns = [Heading(name) for name in matrix[STATED]]
        rows = [
            (source, [TableCell(specs.show("smooth_ece", value), reason=reason) for value in row.values()])
            for source, row in matrix.items()
        ]
        heading = f"Transfer of recalibration maps: {label}"
        tables.append(Table(f"transfer_{label}", heading, meaning, columns, rows, "map fitted on"))
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
    return "questions" if name == "n" else specs.metric_spec(name).heading


def shown_value(name: str, value: float | None) -> str:
    return f"{value:,}" if name == "n" else specs.show(name, value)
