"""The seven headline metrics of a run: for ``summary.json``, the terminal and the demo's report."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from coca_mindspeed.evaluation.catalogue import metric_info, show
from coca_mindspeed.evaluation.metrics import HEADLINE, calibration_metrics
from coca_mindspeed.evaluation.predictions import Prediction, outcomes
from coca_mindspeed.evaluation.safe_text import terminal_text


def summary_metrics(predictions: Sequence[Prediction]) -> dict[str, Any]:
    """The seven headline metrics of a summary, None where undefined."""
    data = outcomes(predictions)
    return calibration_metrics(data.confidence, data.correct, data.tokens_to_confidence).headline()


def metrics_table(rows: Mapping[str, Mapping[str, Any]]) -> Table:
    """A terminal table with a row for each set of metrics."""
    table = Table()
    table.add_column("")
    for name in HEADLINE:
        table.add_column(column_title(name), justify="right")
    for name, metrics in rows.items():
        table.add_row(terminal_text(name), *(shown_value(key, metrics[key]) for key in HEADLINE))
    return table


def column_title(name: str) -> str:
    """A metric's title, with an arrow to where it is better."""
    return "questions" if name == "n" else metric_info(name).heading


def shown_value(name: str, value: float | None) -> str:
    """A metric's value as people read it; ``--`` where it is undefined."""
    return f"{value:,}" if name == "n" else show(name, value)
