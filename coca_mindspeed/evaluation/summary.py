"""The seven headline metrics of a run: for ``summary.json``, the terminal and the demo's report."""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from coca_mindspeed.evaluation.metrics import calibration_metrics
from coca_mindspeed.evaluation.predictions import Prediction, outcomes

# metric -> (column title, whether more is better, None where neither is)
COLUMNS: dict[str, tuple[str, bool | None]] = {
    "accuracy": ("accuracy", True),
    "auroc": ("AUROC", True),
    "ece": ("ECE", False),
    "brier": ("Brier", False),
    "success_rate": ("SR", True),
    "tokens_to_confidence": ("TTC", None),
    "n": ("questions", None),
}


def summary_metrics(predictions: Sequence[Prediction]) -> dict[str, Any]:
    """The seven headline metrics of a summary, None where undefined."""
    data = outcomes(predictions)
    return calibration_metrics(data.confidence, data.correct, data.tokens_to_confidence).headline()


def metrics_table(rows: Mapping[str, Mapping[str, Any]], width: int) -> Table:
    """A terminal table of several sets of metrics.

    Args:
        rows: name -> metrics.
        width: columns of the terminal.  Where a row for each set would not fit, each set is a column.
    """
    cells = {name: [shown_value(key, metrics[key]) for key in COLUMNS] for name, metrics in rows.items()}
    titles = [column_title(name) for name in COLUMNS]
    wide = Table()
    wide.add_column("")
    for title in titles:
        wide.add_column(title, justify="right", no_wrap=True)
    for name, values in cells.items():
        wide.add_row(name, *values)
    if Console(width=10_000).measure(wide).minimum <= width:
        return wide
    tall = Table()
    tall.add_column("")
    for name in cells:
        tall.add_column(name, justify="right", no_wrap=True)
    for title, *values in zip(titles, *cells.values(), strict=True):
        tall.add_row(title, *values)
    return tall


def print_metrics(rows: Mapping[str, Mapping[str, Any]]) -> None:
    """Print :func:`metrics_table` on standard output, as wide as it is where that is no terminal."""
    console = Console() if sys.stdout.isatty() else Console(width=10_000)
    console.print(metrics_table(rows, console.width))


def column_title(name: str) -> str:
    """A metric's title, with an arrow to where it is better."""
    title, more_is_better = COLUMNS[name]
    return title + {True: " ↑", False: " ↓", None: ""}[more_is_better]


def shown_value(name: str, value: float | None) -> str:
    """A metric's value as people read it; ``--`` where it is undefined."""
    if value is None:
        return "--"
    if name == "n":
        return f"{value:,}"
    return f"{value:.1%}" if name in ("accuracy", "success_rate") else f"{value:.3f}"
