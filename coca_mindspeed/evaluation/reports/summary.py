"""The seven headline metrics of a run: for ``summary.json``, the terminal and the demo's report."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from coca_mindspeed.console import PlainConsole
from coca_mindspeed.evaluation.metrics.calibration import HEADLINE, calibration_metrics
from coca_mindspeed.evaluation.metrics.catalogue import metric_info, show
from coca_mindspeed.evaluation.predictions import Prediction, outcomes
from coca_mindspeed.safe_text import terminal_text


def summary_metrics(predictions: Sequence[Prediction]) -> dict[str, Any]:
    """The seven headline metrics of a summary, None where undefined, and how many answers were ``ungradable``."""
    data = outcomes(predictions)
    metrics = calibration_metrics(data.confidence, data.correct, data.tokens_to_confidence)
    return {**metrics.headline(), "ungradable": len(predictions) - len(data)}


def metrics_table(rows: Mapping[str, Mapping[str, Any]], width: int) -> Table:
    """A terminal table of several sets of metrics.

    Args:
        rows: name -> metrics.
        width: columns of the terminal.  Where a row for each set would not fit, each set is a column.
    """
    cells = {name: [shown_value(key, metrics[key]) for key in HEADLINE] for name, metrics in rows.items()}
    titles = [column_title(name) for name in HEADLINE]
    wide = Table()
    wide.add_column("")
    for title in titles:
        wide.add_column(title, justify="right", no_wrap=True)
    for name, values in cells.items():
        wide.add_row(terminal_text(name), *values)
    if Console(width=10_000).measure(wide).minimum <= width:
        return wide
    tall = Table()
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
