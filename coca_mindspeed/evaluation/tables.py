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
    bins_text,
    calibration_metrics,
    show,
    show_range,
    show_under_calibration,
)
from coca_mindspeed.evaluation.predictions import Prediction, outcomes
from coca_mindspeed.evaluation.scoreboard import Column, Run, Scoreboard
from coca_mindspeed.utils.console import PlainConsole, markdown_table, one_line

_BINNED = ("ece", "mce")


@dataclass(frozen=True, slots=True)
class Table:
    """A table of printed numbers; ``rows`` are (run, cells in the order of ``columns``)."""

    heading: str
    meaning: str
    columns: Sequence[str]
    rows: Sequence[tuple[str, Sequence[str]]]

    def markdown(self) -> str:
        header = ["run", *self.columns]
        return markdown_table(header, [(label, *cells) for label, cells in self.rows], numbers=range(1, len(header)))


def result_tables(board: Scoreboard, metrics: Sequence[str]) -> list[Table]:
    """Return a table per metric with data sets as columns; for a single data set, one table with metrics as columns."""
    if len(board.columns) == 1:
        [column] = board.columns
        binned = [METRIC_SPECS[metric].label for metric in metrics if metric in _BINNED]
        meaning = f"{' and '.join(binned)}: {bins_text(board.closed)}" if binned else ""
        rows = [(run.label, [_cell(board, run, column, metric) for metric in metrics]) for run in board.runs]
        return [Table(column.name, meaning, [METRIC_SPECS[metric].heading for metric in metrics], rows)]
    tables = []
    for metric in metrics:
        spec = METRIC_SPECS[metric]
        how = ", percent" if spec.percent else f", {bins_text(board.closed)}" if metric in _BINNED else ""
        rows = [(run.label, [_cell(board, run, column, metric) for column in board.columns]) for run in board.runs]
        tables.append(Table(spec.heading, spec.meaning + how, [column.heading for column in board.columns], rows))
    return tables


def _cell(board: Scoreboard, run: Run, column: Column, metric: str) -> str:
    interval = board.interval(run.label, column, metric)
    beside = [show_range(metric, interval.low, interval.high)]
    if metric == "ece" and (calibrated := under_calibration(board, run, column)):
        beside.append(f"{UNDER_CALIBRATION_LABEL}: {calibrated}")
    number = show(metric, interval.estimate)
    return f"{number} ({'; '.join(beside)})" if beside[0] else number


def under_calibration(board: Scoreboard, run: Run, column: Column) -> str:
    found = board.ece_under_calibration(run.label, column)
    return "" if found is None else show_under_calibration(found.mean, found.high)


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
    columns = [f"≥ {threshold:g}" for threshold in THRESHOLDS]
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
                UNDEFINED
                if math.isnan(risk)
                else f"{risk:.1%} ({low * 100:.1f} to {high * 100:.1f}; {coverage:.1%} accepted)"
                for _, _, coverage, risk, low, high in risk_table(data.confidence, data.correct)
            ]
            rows.append((run.label, cells))
        tables.append(Table(f"Error by threshold: {dataset}", meaning, columns, rows))
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
