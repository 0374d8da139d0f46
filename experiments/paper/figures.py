"""The paper's figures as data.

``figures.json`` holds the tables per data set (appendix) and per category (main text).  Accuracy and success rate
are in percent there, as printed.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from functools import cache
from importlib.resources import files

from coca_mindspeed.errors import ConfigError, UsageError
from coca_mindspeed.evaluation.metrics import METRIC_SPECS, UNDEFINED, round_half_up
from coca_mindspeed.evaluation.scoreboard import DATASETS

# setting -> method -> metric -> data set (or category) -> figure, None where the paper prints ``--``
Figures = Mapping[str, Mapping[str, Mapping[str, Mapping[str, Decimal | None]]]]


@dataclass(frozen=True, slots=True)
class Paper:
    """The paper's tables."""

    per_dataset: Figures
    per_category: Figures


@cache
def paper() -> Paper:
    """Load the figures."""
    text = files(__package__).joinpath("figures.json").read_text(encoding="utf-8")
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
    source = tables.per_category if dataset in DATASETS else tables.per_dataset
    value = source.get(setting, {}).get(method, {}).get(metric, {}).get(dataset)
    return math.nan if value is None else float(value) / METRIC_SPECS[metric].scale
