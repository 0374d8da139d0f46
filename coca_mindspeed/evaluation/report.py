"""Tables of metrics for the terminal and for pages, pages as Markdown and HTML, and the report that compares runs."""

import base64
import html
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from jinja2 import Template
from markdown_it import MarkdownIt
from rich.table import Column as RichColumn
from rich.table import Table as RichTable

from coca_mindspeed import __version__
from coca_mindspeed.evaluation.metrics import (
    FEWEST_LABELS,
    FURTHER_METRICS,
    HEADLINE,
    HEADLINE_METRICS,
    METRIC_SPECS,
    THRESHOLDS,
    UNDEFINED,
    UNDER_CALIBRATION_LABEL,
    BinsClosed,
    MetricOptions,
    RiskRow,
    calibration_metrics,
    risk_table,
    show,
    show_range,
    show_under_calibration,
)
from coca_mindspeed.evaluation.predictions import Prediction, outcomes
from coca_mindspeed.evaluation.scoreboard import Column, Run, Scoreboard
from coca_mindspeed.utils.console import PlainConsole, markdown_table, one_line, printable
from coca_mindspeed.utils.files import write_atomically

if TYPE_CHECKING:
    from matplotlib.figure import Figure


_BINNED = ("ece", "mce", "pce")


@dataclass(frozen=True, slots=True)
class Table:
    """A table of printed numbers; ``rows`` are (label, cells in the order of ``columns``), labelled by ``corner``."""

    heading: str
    meaning: str
    columns: Sequence[str]
    rows: Sequence[tuple[str, Sequence[str]]]
    corner: str = "run"

    def markdown(self) -> str:
        header = [self.corner, *self.columns]
        return markdown_table(header, [(label, *cells) for label, cells in self.rows], numbers=range(1, len(header)))


def result_tables(board: Scoreboard, metrics: Sequence[str]) -> list[Table]:
    """Return a table per metric with data sets as columns; for a single data set, one table with metrics as columns."""
    if len(board.columns) == 1:
        [column] = board.columns
        binned = [METRIC_SPECS[metric].label for metric in metrics if metric in _BINNED]
        meaning = f"{' and '.join(binned)}: {board.options.bins_text}" if binned else ""
        return [_table(board, column.name, meaning, [(METRIC_SPECS[m].heading, column, m) for m in metrics])]
    tables = []
    for metric in metrics:
        spec = METRIC_SPECS[metric]
        how = ", percent" if spec.percent else f", {board.options.bins_text}" if metric in _BINNED else ""
        columns = [(column.heading, column, metric) for column in board.columns]
        tables.append(_table(board, spec.heading, spec.meaning + how, columns))
    return tables


def _table(board: Scoreboard, heading: str, meaning: str, columns: Sequence[tuple[str, Column, str]]) -> Table:
    """Return a table with a column for each (title, column of the board, metric); the best of each is bold."""
    best = [board.best(column, metric) for _, column, metric in columns]
    rows = [
        (
            run.label,
            [
                _cell(board, run, column, metric, run.label in winners)
                for (_, column, metric), winners in zip(columns, best, strict=True)
            ],
        )
        for run in board.runs
    ]
    return Table(heading, meaning, [title for title, _, _ in columns], rows)


def _cell(board: Scoreboard, run: Run, column: Column, metric: str, is_best: bool) -> str:
    interval = board.interval(run.label, column, metric)
    number = show(metric, interval.estimate)
    beside = [show_range(metric, interval.low, interval.high)]
    if metric == "ece" and (calibrated := under_calibration(board, run, column)):
        beside.append(f"{UNDER_CALIBRATION_LABEL}: {calibrated}")
    shown = f"**{number}**" if is_best else number
    return f"{shown} ({'; '.join(beside)})" if beside[0] else shown


def under_calibration(board: Scoreboard, run: Run, column: Column) -> str:
    found = board.ece_under_calibration(run.label, column)
    return "" if found is None else show_under_calibration(found.mean, found.high)


def summary_table(board: Scoreboard) -> str:
    """Return the headline metrics in Markdown, a row for each metric, run and column of the board."""
    rows: list[Sequence[object]] = []
    for metric, (run, column) in product(HEADLINE_METRICS, list(product(board.runs, board.columns))):
        where, interval = (run.label, column.heading), board.interval(run.label, column, metric)
        shown = (show(metric, interval.estimate), show_range(metric, interval.low, interval.high) or UNDEFINED)
        rows.append((METRIC_SPECS[metric].heading, *where, board.count(run.label, column), *shown))
        if metric == "ece" and (of_calibrated := board.ece_under_calibration(run.label, column)) is not None:
            bound = f"95% below {show('ece', of_calibrated.high)}"
            rows.append((UNDER_CALIBRATION_LABEL, *where, "", show("ece", of_calibrated.mean), bound))
    return markdown_table(("metric", "run", "data", "n", "value", "95% interval"), rows, numbers=(3, 4))


def legend(metrics: Sequence[str]) -> str:
    """The meaning of the metrics, a line for each."""
    return "".join(f"{METRIC_SPECS[name].label}: {METRIC_SPECS[name].meaning}.\n" for name in metrics)


def reasons_not_usable(board: Scoreboard) -> dict[tuple[str, str], str]:
    """Run and data set -> why its confidence is not shown to separate right from wrong answers; without the others."""
    unusable = {}
    for run, column in product(board.runs, board.columns):
        if column.is_average or not (count := board.count(run.label, column)):
            continue
        interval = board.interval(run.label, column, "auroc")
        few = f"{count} labels are fewer than {FEWEST_LABELS}"
        reasons = [few] if count < FEWEST_LABELS else []
        if not interval.low > 0.5:
            bounds = show_range("auroc", interval.low, interval.high)
            reasons.append(f"the 95% interval of AUROC, {bounds}, is not above 0.5" if bounds else "AUROC is undefined")
        if reasons:
            unusable[run.label, column.name] = " and ".join(reasons)
    return unusable


def not_shown_usable(board: Scoreboard) -> str:
    """A line for each of the :func:`reasons_not_usable`."""
    lines = ((one_line(f"{run}, {dataset}"), reasons) for (run, dataset), reasons in reasons_not_usable(board).items())
    return "".join(f"\n{where}: the confidence is not shown to be usable: {reasons}.\n" for where, reasons in lines)


def risk_tables(board: Scoreboard) -> list[Table]:
    """Return, for each data set, error and coverage of accepting from each threshold on."""
    meaning = (
        "error rate, percent, of the answers with at least this stated confidence, the exact 95% interval of a single "
        "threshold, and the fraction of all answers accepted; `coca-router calibrate --risk` certifies a threshold"
    )
    tables = []
    for dataset in board.datasets:
        for first in range(0, len(board.runs), _BESIDE):
            runs = board.runs[first : first + _BESIDE]
            by_run = [outcomes(run.by_dataset().get(dataset, [])) for run in runs]
            risks = [risk_table(data.confidence, data.correct) for data in by_run]
            rows = [
                (f"≥ {threshold:g}", list(map(_risk, at)))
                for threshold, at in zip(THRESHOLDS, zip(*risks, strict=True), strict=True)
            ]
            labels = [run.label for run in runs]
            tables.append(Table(f"Error by threshold: {dataset}", meaning, labels, rows, "confidence"))
    return tables


_BESIDE = 2  # runs in a table of 100 columns


def _risk(row: RiskRow) -> str:
    if math.isnan(row.risk):
        return UNDEFINED
    return f"{row.risk:.1%} ({row.low * 100:.1f} to {row.high * 100:.1f}; {row.coverage:.1%} accepted)"


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


_PAGE = Path(__file__).with_name("report_page.html.j2")


def write_page(path: Path, text: str, pictures: Mapping[str, bytes]) -> tuple[Path, Path]:
    """Write a report and its pictures; return the paths of the HTML file and of the Markdown file.

    Args:
        path: of the Markdown file, ``NAME.md``; the HTML file is ``NAME.html`` beside it.
        text: CommonMark with tables; it begins with a heading. HTML in it is shown as text.
        pictures: PNG files by the path that the text names, relative to the directory of ``path``.  The HTML file
            embeds them and shows no other picture.
    """
    text = printable(text)
    for name, png in pictures.items():
        write_atomically(path.parent / name, png)
    write_atomically(path, text)
    page = path.with_suffix(".html")
    write_atomically(page, _html(text, pictures))
    return page, path


def _html(text: str, pictures: Mapping[str, bytes]) -> str:
    parser = MarkdownIt("commonmark", {"html": False}).enable("table")
    tokens = parser.parse(text)
    links: list[str] = []
    for token, content in pairwise(tokens):
        if token.type == "heading_open" and token.tag == "h2":
            token.attrSet("id", f"section-{len(links)}")
            links.append(f'<a href="#section-{len(links)}">{parser.renderInline(content.content)}</a>')
    for picture in (child for token in tokens for child in token.children or () if child.type == "image"):
        png = base64.b64encode(pictures.get(unquote(str(picture.attrGet("src"))), b"")).decode("ascii")
        picture.attrSet("src", f"data:image/png;base64,{png}")
    title = html.escape("".join(part.content for part in tokens[1].children or ()))
    body = parser.renderer.render(tokens, parser.options, {})
    page = Template(_PAGE.read_text(encoding="utf-8"), keep_trailing_newline=True)
    return str(page.render(title=title, links="".join(links), body=body))


_MARKUP = re.compile(r"[\\`*<&~\[\]]|(?<!\w)_+|_+(?!\w)")


def plain_text(text: str) -> str:
    """Return text as one line of Markdown without markup; table cells also need their bars escaped."""
    return _MARKUP.sub(lambda markup: "".join(f"\\{character}" for character in markup[0]), one_line(text))


def inline_code(text: str) -> str:
    """Return text as inline code on one line; a backtick would end it and becomes an apostrophe."""
    return f"`{one_line(text).replace('`', chr(39))}`"


def code_block(text: str) -> str:
    """Return text as a code block of Markdown."""
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence}\n{text}\n{fence}"


_REPORT_DPI = 100
_SAMPLES = 3  # responses of each run and data set
_SHOWN_GOLD, _SHOWN_QUESTION, _SHOWN_CHARACTERS = 200, 800, 1200
_HOW_TO_READ = (
    "In parentheses the 95% interval, and with ECE the mean and 95th percentile that a calibrated model with the same "
    "confidences would show; the best of a column is bold where its paired difference to every other run is decided "
    f"(95%); `{UNDEFINED}` is undefined. Means over a category leave undefined data sets out."
)
_NO_PREDICTIONS = (
    "The runs hold no predictions, so there are no results: set data.evaluate, and evaluation.final_questions above 0."
)


@dataclass(frozen=True, slots=True)
class Opening:
    """The beginning of the report of one run: Markdown, with a title, and the pictures that it names.

    They show the training and the reliability of all answers together.
    """

    text: str
    pictures: Mapping[str, bytes]


def reliability_caption(closed: BinsClosed) -> str:
    return (
        "Filled: fraction correct; hatched: gap to the stated confidence; vertical lines: 95% intervals; "
        f"dashed: perfect calibration; above each bar its number of answers. Bins are closed on the {closed}."
    )


def _plots(board: Scoreboard, runs: Sequence[Run], opening: Opening | None) -> tuple[list[str], dict[str, bytes]]:
    """Sections with the plots that the opening lacks, and these by path."""
    from coca_mindspeed.evaluation.plots import (  # matplotlib
        png_bytes,
        reliability_diagram,
        risk_coverage_curves,
        training_curves,
    )

    parts, pictures = ["## Plots"], {}

    def add(name: str, heading: str, caption: str, figure: "Figure") -> None:
        path, heading = f"figures/{name}.png", plain_text(heading)
        pictures[path] = png_bytes(figure, _REPORT_DPI)
        parts.extend([f"### {heading}", f"![{heading}. {caption}]({path})", caption])

    if training := {run.label: run.training for run in runs if run.training}:
        caption = "A line for each run; faint: each step, strong: moving average."
        add("training", "Training", caption, training_curves(training))
    closed = board.options.closed
    for dataset in board.datasets:
        groups = {run.label: outcomes(rows) for run in board.runs if (rows := run.by_dataset().get(dataset))}
        slug = "".join(c if c.isalnum() else "_" for c in dataset)
        if opening is None or len(board.datasets) > 1:
            caption = reliability_caption(closed)
            add(f"reliability_{slug}", f"Reliability: {dataset}", caption, reliability_diagram(groups, closed))
        risk = "Error rate when only the most confident answers are given."
        add(f"risk_coverage_{slug}", f"Risk and coverage: {dataset}", risk, risk_coverage_curves(groups))
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


def write_report(
    runs: Sequence[Run], directory: Path, *, closed: BinsClosed = "right", opening: Opening | None = None
) -> tuple[Path, Path]:
    """Write ``report.html`` (self-contained), ``report.md`` and pictures; return the paths of the first two.

    ``closed`` is the side on which bins include their edge.  An ``opening`` is that of one run, whose answers ``runs``
    are; if it has no pictures, there are none.
    """
    board = Scoreboard(runs, options=MetricOptions(closed=closed))
    plots, pictures = ([], {}) if opening and not opening.pictures else _plots(board, runs, opening)
    parts = ["# Calibration report", f"coca-mindspeed {__version__}. {_HOW_TO_READ}"]
    if opening is not None:
        parts, pictures = [opening.text, *parts[1:]], {**opening.pictures, **pictures}
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
        _shown_table(table)
        for metrics in (HEADLINE_METRICS, FURTHER_METRICS)
        for table in result_tables(board, metrics)
    ]
    counts = [(run.label, [str(board.count(run.label, column)) for column in board.columns]) for run in board.runs]
    parts.append(_shown_table(Table("Predictions", "", [column.heading for column in board.columns], counts)))
    return [*parts, "## Error and coverage by threshold", *map(_shown_table, risk_tables(board))]


def _shown_table(table: Table) -> str:
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
