"""The paper's figures as data, its category averages, and the cells where its tables disagree.

``paper_figures.json`` holds the paper's tables per data set (appendix) and per category (main text).  Accuracy and
success rate are in percent there, as printed.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import ROUND_HALF_UP, Decimal
from functools import cache
from importlib.resources import files

from coca_mindspeed.errors import ConfigError, UsageError
from coca_mindspeed.evaluation.metrics.specs import METRIC_SPECS, UNDEFINED, round_half_up

Figures = Mapping[str, Mapping[str, Mapping[str, Mapping[str, Decimal | None]]]]


@dataclass(frozen=True, slots=True)
class Paper:
    """The paper's tables; ``categories`` maps a category to its data sets.

    Figures are setting -> method -> metric -> data set (or category), None where the paper prints ``--``.
    """

    categories: Mapping[str, Sequence[str]]
    per_dataset: Figures
    per_category: Figures


@dataclass(frozen=True, slots=True)
class PaperFigure:
    """A cell of the paper's category tables, with the mean of its per-dataset figures (None if all are undefined)."""

    setting: str
    method: str
    metric: str
    category: str
    printed: Decimal
    rebuilt: Decimal | None

    @property
    def agrees(self) -> bool:
        return self.printed == self.rebuilt


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
    info = METRIC_SPECS[metric]
    return f"{round_half_up(value * info.scale, 2)}{'%' if info.percent else ''}"


def category_mean(values: Sequence[Decimal | None]) -> Decimal | None:
    """Plain mean over a category's data sets without undefined ones (None: all are), rounded half up to hundredths."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    return (sum(known, Decimal(0)) / len(known)).quantize(Decimal("0.01"), rounding=ROUND_HALF_UP)


def rebuilt_cells() -> Iterator[PaperFigure]:
    """Yield every cell of the paper's category tables, rebuilt from its per-dataset tables."""
    tables = paper()
    for setting, methods in tables.per_category.items():
        for method, metrics in methods.items():
            for metric, cells in metrics.items():
                source = tables.per_dataset[setting][method][metric]
                for category, figure in cells.items():
                    if figure is not None:
                        mean = category_mean([source[name] for name in tables.categories[category]])
                        yield PaperFigure(setting, method, metric, category, figure, mean)


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
    return float("nan") if value is None else float(value) / METRIC_SPECS[metric].scale
