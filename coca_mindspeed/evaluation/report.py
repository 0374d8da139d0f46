"""The report that compares runs: metrics with intervals, plots and responses."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from matplotlib.figure import Figure

from coca_mindspeed import __version__
from coca_mindspeed.evaluation.binning import BinsClosed
from coca_mindspeed.evaluation.metrics import FURTHER_METRICS, HEADLINE_METRICS, METRIC_SPECS, UNDEFINED
from coca_mindspeed.evaluation.page import code_block, plain_text, write_page
from coca_mindspeed.evaluation.plots import png_bytes, reliability_diagram, training_curves
from coca_mindspeed.evaluation.predictions import Prediction, outcomes
from coca_mindspeed.evaluation.scoreboard import Run, Scoreboard
from coca_mindspeed.evaluation.tables import Table, result_tables, risk_tables

_REPORT_DPI = 100
_SAMPLES = 3  # responses of each run and data set
_SHOWN_GOLD, _SHOWN_QUESTION, _SHOWN_CHARACTERS = 200, 800, 1200
_HOW_TO_READ = (
    "In parentheses the 95% interval, and with ECE the mean and 95th percentile that a calibrated model with the same "
    f"confidences would show; `{UNDEFINED}` is undefined. Means over a category leave undefined data sets out."
)
_NO_PREDICTIONS = (
    "The runs hold no predictions, so there are no results: set data.evaluate, and evaluation.final_questions above 0."
)


def _plots(board: Scoreboard, runs: Sequence[Run]) -> tuple[list[str], dict[str, bytes]]:
    """Sections with plots, and these by path."""
    parts, pictures = ["## Plots"], {}

    def add(name: str, heading: str, caption: str, figure: Figure) -> None:
        path, heading = f"figures/{name}.png", plain_text(heading)
        pictures[path] = png_bytes(figure, _REPORT_DPI)
        parts.extend([f"### {heading}", f"![{heading}. {caption}]({path})", caption])

    if training := {run.label: run.training for run in runs if run.training}:
        caption = "A line for each run; faint: every step, strong: moving average."
        add("training", "Training", caption, training_curves(training))
    reliability = (
        "Filled: fraction correct; hatched: gap to the stated confidence; vertical lines: 95% intervals; "
        f"dashed: perfect calibration; above each bar its number of answers. Bins are closed on the {board.closed}."
    )
    for dataset in board.datasets:
        groups = {run.label: outcomes(rows) for run in board.runs if (rows := run.by_dataset().get(dataset))}
        slug = "".join(c if c.isalnum() else "_" for c in dataset)
        add(f"reliability_{slug}", f"Reliability: {dataset}", reliability, reliability_diagram(groups, board.closed))
    return parts, pictures


def most_miscalibrated(run: Run, count: int) -> list[Prediction]:
    """Return the ``count`` responses of each data set whose confidence is furthest from correctness, worst first."""

    def place(p: Prediction) -> tuple[object, ...]:
        return -abs((p.confidence or 0.0) - bool(p.correct)), p.key

    stated = [[p for p in rows if p.confidence is not None] for rows in run.by_dataset().values()]
    return sorted((p for rows in stated for p in sorted(rows, key=place)[:count]), key=lambda p: place(p)[:1])


def shorten(text: str) -> str:
    """Cut the middle out of a long text."""
    if len(text) <= _SHOWN_CHARACTERS:
        return text
    half = _SHOWN_CHARACTERS // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters left out ...]\n{text[-half:]}"


def write_report(runs: Sequence[Run], directory: Path, *, closed: BinsClosed = "right") -> tuple[Path, Path]:
    """Write ``report.html`` (self-contained), ``report.md`` and ``figures/*.png``; return the paths of the first two.

    ``closed`` is the side on which bins include their edge.
    """
    board = Scoreboard(runs, closed=closed)
    plots, pictures = _plots(board, runs)
    parts = ["# Calibration report", f"coca-mindspeed {__version__}. {_HOW_TO_READ}"]
    parts += _results(board) if board.runs else [_NO_PREDICTIONS]
    parts += plots
    if board.runs:
        parts.append("## Responses, most miscalibrated first")
        parts += [part for run in board.runs for part in _samples(run)]
    return write_page(directory / "report.md", "\n\n".join(parts) + "\n", pictures)


def _results(board: Scoreboard) -> list[str]:
    legend = "; ".join(f"{spec.heading}: {spec.meaning}" for spec in METRIC_SPECS.values())
    parts = ["## Results", f"{legend}. ↑: higher is better; ↓: lower is better."]
    parts += [
        _table(table) for metrics in (HEADLINE_METRICS, FURTHER_METRICS) for table in result_tables(board, metrics)
    ]
    counts = [(run.label, [str(board.count(run.label, column)) for column in board.columns]) for run in board.runs]
    parts.append(_table(Table("Predictions", "", [column.heading for column in board.columns], counts)))
    return [*parts, "## Error and coverage by threshold", *map(_table, risk_tables(board))]


def _table(table: Table) -> str:
    """A table with its heading and its meaning; names are without markup."""
    rows = [(plain_text(label), cells) for label, cells in table.rows]
    text = replace(table, columns=[plain_text(column) for column in table.columns], rows=rows).markdown()
    meaning = table.meaning and f"{table.meaning[0].upper()}{table.meaning[1:]}."
    return "\n\n".join(filter(None, (f"### {plain_text(table.heading)}", meaning, text)))


def _samples(run: Run) -> list[str]:
    if not (rows := most_miscalibrated(run, _SAMPLES)):
        return [f"{plain_text(run.label)}: no response states a valid confidence."]
    parts = []
    for p in rows:
        gold = f"; gold answer {plain_text(p.gold[:_SHOWN_GOLD])}" if p.gold else ""
        parts += [
            f"### {plain_text(f'{run.label}: {p.dataset} {p.id}')}",
            f"Stated {p.confidence:.2f}, {p.outcome}{gold}.",
            code_block(p.question[:_SHOWN_QUESTION]),
            code_block(shorten(p.response)),
        ]
    return parts
