"""Tables of our figures next to the paper's, and of the paper's own."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from itertools import product

from coca_mindspeed.errors import ConfigError
from coca_mindspeed.evaluation.metrics import specs
from coca_mindspeed.evaluation.metrics.specs import HEADLINE_METRICS, METRIC_SPECS, UNDEFINED, show, show_range
from coca_mindspeed.evaluation.paper import published as papers
from coca_mindspeed.evaluation.paper.published import PaperFigure, paper, printed, published
from coca_mindspeed.evaluation.reports.scoreboard import Column, Scoreboard
from coca_mindspeed.evaluation.runs import Run
from coca_mindspeed.utils.markdown import markdown_cell, markdown_table


@dataclass(frozen=True, slots=True)
class PaperComparison:
    """Our runs next to the paper's table; ``left_out`` names our averages over other data sets than the paper's."""

    setting: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    left_out: Sequence[str]

    def markdown(self) -> str:
        listed = "".join(f"- {markdown_cell(line)}\n" for line in self.left_out)
        return markdown_table(self.header, self.rows) + (f"\nNot compared:\n\n{listed}" if listed else "")


def compare_with_paper(board: Scoreboard, setting: str) -> PaperComparison:
    """Compare every cell that the paper prints: our figure, the paper's, and the difference with our interval.

    A run is compared with the paper's method named by its predictions' ``method``, or else by its label.  An average is
    compared only with the paper's average of the same data sets.

    Raises:
        ConfigError: the setting or a run's method is not the paper's, or there is nothing to compare.
    """
    methods = {run.label: _method(run, setting) for run in board.runs}
    columns = [column for column in board.columns if _is_papers(column)]
    rows = []
    for run, column, metric in product(board.runs, columns, HEADLINE_METRICS):
        theirs = published(setting, methods[run.label], metric, column.name)
        ours = board.interval(run.label, column, metric)
        if math.isnan(theirs) or math.isnan(ours.estimate):
            continue
        figures = [show(metric, ours.estimate), printed(metric, theirs)]
        figures.append(show(metric, ours.estimate - theirs, signed=True))
        figures.append(show_range(metric, ours.low - theirs, ours.high - theirs, signed=True))
        found = board.ece_under_calibration(run.label, column) if metric == "ece" else None
        figures.append("" if found is None else specs.show_under_calibration(found.mean, found.high))
        rows.append([run.label, column.name, METRIC_SPECS[metric].label, *figures])
    if not rows:
        theirs_sets = [name for sets in paper().categories.values() for name in sets]
        raise ConfigError(
            f"nothing to compare: the runs' data sets are {', '.join(board.datasets)}, the paper's "
            f"{', '.join(theirs_sets)}"
        )
    header = ["run", "data", "metric", "ours", "paper", "difference", "95% interval", specs.UNDER_CALIBRATION_LABEL]
    return PaperComparison(setting, header, rows, list(_left_out(board)))


def _is_papers(column: Column) -> bool:
    """Whether the paper's figure of this name, if any, is over the same data sets."""
    sets = paper().categories.get(column.name)
    return sets is None or (column.is_average and set(column.datasets) == set(sets))


def _left_out(board: Scoreboard) -> Iterator[str]:
    for column in board.columns:
        sets = paper().categories.get(column.name)
        if sets is None or not column.is_average:
            continue
        if not _is_papers(column):
            without = ", ".join(name for name in sets if name not in column.datasets)
            foreign = ", ".join(name for name in column.datasets if name not in sets)
            parts = [f"{word} {names}" for word, names in (("without", without), ("with", foreign)) if names]
            yield f"{column.name}: not the paper's average, {' and '.join(parts)}"
            continue
        for run in board.runs:
            answered = run.by_dataset()
            if lacking := [name for name in sets if name not in answered]:
                yield f"{column.name}, {run.label}: not the paper's average, without {', '.join(lacking)}"


def _method(run: Run, setting: str) -> str:
    papers.check_setting(setting)
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
    """Return the paper's category tables rebuilt from its per-dataset tables, and the cells that disagree."""
    tables = paper()
    by_cell = {(c.setting, c.method, c.metric, c.category): c for c in papers.rebuilt_cells()}
    parts = ["# The paper's category tables, rebuilt from its per-dataset tables\n"]
    for setting, methods in tables.per_category.items():
        metrics = list(next(iter(methods.values())))
        header = ["method", *(f"{METRIC_SPECS[m].label} {category}" for m in metrics for category in tables.categories)]
        rows = [
            [method, *(_rebuilt(by_cell.get((setting, method, m, c))) for m in metrics for c in tables.categories)]
            for method in methods
        ]
        parts.append(f"## {setting}\n\n{markdown_table(header, rows)}")
    cells = [cell for cell in by_cell.values() if not cell.agrees]
    listed = [
        [c.setting, c.method, METRIC_SPECS[c.metric].label, c.category, _figure(c.printed), _figure(c.rebuilt)]
        for c in cells
    ]
    header = ["setting", "method", "metric", "category", "printed", "rebuilt"]
    parts.append(
        f"## Cells where the paper's tables disagree: {len(cells)} of {len(by_cell)}\n\n"
        "They are marked with a star above.\n\n" + markdown_table(header, listed)
    )
    return "\n".join(parts)


def _rebuilt(cell: PaperFigure | None) -> str:
    return UNDEFINED if cell is None else _figure(cell.rebuilt) + ("" if cell.agrees else "*")
