"""The paper's tables as text, and our figures beside them."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal

from coca_mindspeed.errors import ConfigError
from coca_mindspeed.evaluation.metrics.specs import (
    CALIBRATED_LABEL,
    CATALOGUE,
    HEADLINE_METRICS,
    UNDEFINED,
    show,
    show_calibrated,
    show_range,
)
from coca_mindspeed.evaluation.paper.published import (
    PaperFigure,
    check_setting,
    disagreements,
    paper,
    printed,
    published,
    rebuilt_cells,
)
from coca_mindspeed.evaluation.reports.scoreboard import Column, Scoreboard
from coca_mindspeed.evaluation.runs import Run
from coca_mindspeed.utils.markdown import markdown_cell, markdown_table


@dataclass(frozen=True, slots=True)
class PaperComparison:
    """Our runs beside the paper's table.

    Attributes:
        setting: the paper's, such as ``qwen2.5-3b/math``.
        header: names of the columns.
        rows: printed cells.
        left_out: the averages of ours that are not over the data sets of the paper's, a line each.
    """

    setting: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    left_out: Sequence[str]

    def markdown(self) -> str:
        """The table, and below it what is not compared."""
        listed = "".join(f"- {markdown_cell(line)}\n" for line in self.left_out)
        return markdown_table(self.header, self.rows) + (f"\nNot compared:\n\n{listed}" if listed else "")


def compare_with_paper(board: Scoreboard, setting: str) -> PaperComparison:
    """Our figure, the paper's, and the difference with our interval, for every cell that the paper prints.

    A run is compared with the paper's method of the same name: its predictions' ``method``, or else its label.  An
    average is compared with the paper's of the same data sets only.

    Raises:
        ConfigError: the setting is unknown, a run's method is not the paper's, or there is nothing to compare.
    """
    methods = {run.label: _method(run, setting) for run in board.runs}
    columns = [column for column in board.columns if _is_papers(column)]
    rows = []
    for run in board.runs:
        for column in columns:
            for metric in HEADLINE_METRICS:
                theirs = published(setting, methods[run.label], metric, column.name)
                ours = board.interval(run.label, column, metric)
                if math.isnan(theirs) or math.isnan(ours.estimate):
                    continue
                rows.append(
                    [
                        run.label,
                        column.name,
                        CATALOGUE[metric].label,
                        show(metric, ours.estimate),
                        printed(metric, theirs),
                        show(metric, ours.estimate - theirs, signed=True),
                        show_range(metric, ours.low - theirs, ours.high - theirs, signed=True),
                        _calibrated(board, run, column) if metric == "ece" else "",
                    ]
                )
    if not rows:
        raise ConfigError(
            f"nothing to compare: the runs' data sets are {', '.join(board.datasets)}, the paper's "
            f"{', '.join(name for sets in paper().categories.values() for name in sets)}"
        )
    return PaperComparison(
        setting,
        ["run", "data", "metric", "ours", "paper", "difference", "95% interval", CALIBRATED_LABEL],
        rows,
        list(_left_out(board)),
    )


def _is_papers(column: Column) -> bool:
    """Whether the paper's figure of this name, if it has one, is of the same data sets."""
    sets = paper().categories.get(column.name)
    return sets is None or (column.is_average and set(column.datasets) == set(sets))


def _left_out(board: Scoreboard) -> Iterator[str]:
    """The averages that bear the name of one of the paper's and are not over its data sets."""
    for column in board.columns:
        sets = paper().categories.get(column.name)
        if sets is None or not column.is_average:
            continue
        if not _is_papers(column):
            without = ", ".join(name for name in sets if name not in column.datasets)
            foreign = ", ".join(name for name in column.datasets if name not in sets)
            parts = [f"{word} {names}" for word, names in (("without", without), ("with", foreign)) if names]
            yield f"{column.name}: {' and '.join(parts)} it is not the paper's average"
            continue
        for run in board.runs:
            answered = run.by_dataset()
            if lacking := [name for name in sets if name not in answered]:
                yield f"{column.name}, {run.label}: without {', '.join(lacking)} it is not the paper's average"


def _calibrated(board: Scoreboard, run: Run, column: Column) -> str:
    found = board.calibrated(run.label, column)
    return UNDEFINED if found is None else show_calibrated(found.mean, found.high)


def _method(run: Run, setting: str) -> str:
    check_setting(setting)
    methods = paper().per_dataset[setting]
    for name in (run.method, run.label):
        if name in methods:
            return str(name)
    raise ConfigError(
        f"run {run.label!r}: method {run.method!r} is not in the paper's table of {setting}, which has "
        f"{', '.join(methods)}; set 'method' in its predictions"
    )


def _figure(value: Decimal | None) -> str:
    return UNDEFINED if value is None else f"{value:.2f}"


def paper_report() -> str:
    """The paper's category tables rebuilt from its per-dataset tables, and the cells where the two disagree."""
    tables = paper()
    by_cell = {(c.setting, c.method, c.metric, c.category): c for c in rebuilt_cells()}
    parts = ["# The paper's category tables, rebuilt from its per-dataset tables\n"]
    for setting, methods in tables.per_category.items():
        metrics = list(next(iter(methods.values())))
        header = ["method", *(f"{CATALOGUE[m].label} {category}" for m in metrics for category in tables.categories)]
        rows = [
            [method, *(_rebuilt(by_cell.get((setting, method, m, c))) for m in metrics for c in tables.categories)]
            for method in methods
        ]
        parts.append(f"## {setting}\n\n{markdown_table(header, rows)}")
    cells = disagreements()
    listed = [
        [c.setting, c.method, CATALOGUE[c.metric].label, c.category, _figure(c.printed), _figure(c.rebuilt)]
        for c in cells
    ]
    header = ["setting", "method", "metric", "category", "printed", "rebuilt"]
    parts.append(
        f"## Where the paper disagrees with itself: {len(cells)} of {len(by_cell)} cells\n\n"
        "A star marks them above.\n\n" + markdown_table(header, listed)
    )
    return "\n".join(parts)


def _rebuilt(cell: PaperFigure | None) -> str:
    if cell is None:
        return UNDEFINED
    return _figure(cell.rebuilt) + ("" if cell.agrees else "*")
