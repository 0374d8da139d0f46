"""The seven headline metrics of a run: for ``summary.json``, the terminal and the demo's report."""

from collections.abc import Mapping, Sequence
from typing import Any

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


def metrics_table(rows: Mapping[str, Mapping[str, Any]]) -> Table:
    """A terminal table with a row for each set of metrics."""
    table = Table()
    table.add_column("")
    for name in COLUMNS:
        table.add_column(column_title(name), justify="right")
    for name, metrics in rows.items():
        table.add_row(name, *(shown_value(key, metrics[key]) for key in COLUMNS))
    return table


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
