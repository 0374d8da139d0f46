"""The paper's figures as data, and its category tables rebuilt from its per-dataset tables.

``paper_figures.json`` holds the tables per data set (appendix) and per category (main text).  Accuracy and success rate
are in percent there, as printed.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import ROUND_HALF_UP, Decimal
from functools import cache
from importlib.resources import files

from coca_mindspeed.errors import ConfigError, UsageError
from coca_mindspeed.evaluation.metrics import METRIC_SPECS, UNDEFINED, round_half_up
from coca_mindspeed.utils.console import markdown_table

# setting -> method -> metric -> data set (or category) -> figure, None where the paper prints ``--``
Figures = Mapping[str, Mapping[str, Mapping[str, Mapping[str, Decimal | None]]]]


@dataclass(frozen=True, slots=True)
class Paper:
    """The paper's tables; ``categories`` maps a category to its data sets."""

    categories: Mapping[str, Sequence[str]]
    per_dataset: Figures
    per_category: Figures


@cache
def paper() -> Paper:
    """Load the packaged figures."""
    text = files(__package__).joinpath("paper_figures.json").read_text(encoding="utf-8")
    # Decimals, so that a mean of printed figures is exact and its halves are halves.
    return Paper(**json.loads(text, parse_float=Decimal))


def printed(metric: str, value: float) -> str:
    """Format a figure of the paper with two decimals; ``--`` for NaN."""
    if math.isnan(value):
        return UNDEFINED
    spec = METRIC_SPECS[metric]
    return f"{round_half_up(value * spec.scale, 2)}{'%' if spec.percent else ''}"


def check_setting(setting: str) -> None:
    """Raise UsageError unless the paper has this setting."""
    if setting not in (known := paper().per_dataset):
        raise UsageError(f"the paper has no setting {setting!r}; it has {', '.join(known)}")


def published(setting: str, method: str, metric: str, dataset: str) -> float:
    """Return a figure of the paper in our units (accuracy as a fraction), NaN where it prints none.

    ``dataset`` is a data set or a category.

    Raises:
        ConfigError: the paper has no such setting or method.
    """
    check_setting(setting)
    tables = paper()
    methods = tables.per_dataset[setting]
    if method not in methods:
        raise ConfigError(f"the paper has no method {method!r} in {setting}; it has {', '.join(methods)}")
    source = tables.per_category if dataset in tables.categories else tables.per_dataset
    value = source.get(setting, {}).get(method, {}).get(metric, {}).get(dataset)
    return math.nan if value is None else float(value) / METRIC_SPECS[metric].scale


def category_mean(values: Sequence[Decimal | None]) -> Decimal | None:
    """Plain mean over a category's data sets without undefined ones (None: all are), rounded half up to hundredths."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    return (sum(known, Decimal(0)) / len(known)).quantize(Decimal("0.01"), rounding=ROUND_HALF_UP)


def rebuilt_cells() -> dict[tuple[str, str, str, str], tuple[Decimal, Decimal | None]]:
    """Return (setting, method, metric, category) -> the printed figure, and the mean of its per-dataset figures."""
    tables = paper()
    return {
        (setting, method, metric, category): (
            figure,
            category_mean([tables.per_dataset[setting][method][metric][name] for name in tables.categories[category]]),
        )
        for setting, methods in tables.per_category.items()
        for method, metrics in methods.items()
        for metric, cells in metrics.items()
        for category, figure in cells.items()
        if figure is not None
    }


def paper_report() -> str:
    """Return the category tables rebuilt from the per-dataset tables, and the cells that disagree."""
    tables, cells = paper(), rebuilt_cells()

    def rebuilt(key: tuple[str, str, str, str]) -> str:
        if key not in cells:
            return UNDEFINED
        figure, mean = cells[key]
        return _figure(mean) + ("" if figure == mean else "*")

    parts = ["# The paper's category tables, rebuilt from its per-dataset tables\n"]
    for setting, methods in tables.per_category.items():
        columns = [(metric, category) for metric in next(iter(methods.values())) for category in tables.categories]
        header = ["method", *(f"{METRIC_SPECS[metric].label} {category}" for metric, category in columns)]
        rows = [[method, *(rebuilt((setting, method, *column)) for column in columns)] for method in methods]
        parts.append(f"## {setting}\n\n{markdown_table(header, rows)}")
    listed = [
        [setting, method, METRIC_SPECS[metric].label, category, _figure(figure), _figure(mean)]
        for (setting, method, metric, category), (figure, mean) in cells.items()
        if figure != mean
    ]
    header = ["setting", "method", "metric", "category", "printed", "rebuilt"]
    parts.append(
        f"## Cells where the paper's tables disagree: {len(listed)} of {len(cells)}\n\n"
        "They are marked with a star above.\n\n" + markdown_table(header, listed)
    )
    return "\n".join(parts)


def _figure(value: Decimal | None) -> str:
    return UNDEFINED if value is None else f"{value:.2f}"
