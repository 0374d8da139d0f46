"""The paper's tables with our numbers in them: which methods stand beside each other, and what the paper has there."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from coca_mindspeed.errors import ConfigError
from coca_mindspeed.evaluation.catalogue import metric_info, show
from coca_mindspeed.evaluation.paper import published
from coca_mindspeed.reproduce.plan import Plan
from coca_mindspeed.reproduce.results import Results, Spread, spread
from coca_mindspeed.reproduce.table import Table

_FIGURES = ("accuracy", "auroc", "ece", "brier")


@dataclass(frozen=True)
class Comparison:
    """Methods beside each other.

    Attributes:
        name: of the files.
        title: above the table.
        methods: our name -> the paper's name of the same method, or None where it has none.
        metrics: which.
        paper_setting: the paper's table, or None.
        note: below the title.
    """

    name: str
    title: str
    methods: Mapping[str, str | None]
    metrics: tuple[str, ...]
    paper_setting: str | None
    note: str


def comparisons(plan: Plan, setting: str) -> list[Comparison]:
    """The comparisons for which the setting has at least two methods."""
    own = plan.settings[setting]
    present = [*own.baselines, *own.trained]
    main = ("instruct", "rlvr", "rlvr+question_prob", "rlvr+assessor", "rlvr+probe", "coca")
    paper = plan.paper_setting
    possible = [
        Comparison(
            f"{setting}_main",
            f"{own.title}: every method that states its confidence first",
            {m: m for m in main},
            _FIGURES,
            paper,
            f"The paper's figures are those of {paper}.",
        ),
        Comparison(
            f"{setting}_answer_first",
            f"{own.title}: against methods that answer first",
            {m: m for m in ("majority_voting", "rlcr", "coca")},
            (*_FIGURES, "tokens_to_confidence"),
            "answer_first/qwen2.5-7b",
            "TTC: tokens until the confidence is known. The paper prints no ECE or Brier here.",
        ),
        Comparison(
            f"{setting}_segment_against_joint",
            f"{own.title}: rewards by segment against one summed reward",
            {"coca": "segment", "joint": "joint"},
            _FIGURES,
            "ablation/qwen2.5-7b",
            "`coca` rewards each segment by itself; `joint` rewards all tokens with the sum.",
        ),
        Comparison(
            f"{setting}_choices",
            f"{own.title}: choices that the paper leaves open",
            dict.fromkeys(["coca", *(m for m in present if m.startswith("coca, "))]),
            (*_FIGURES, "success_rate", "tokens_to_confidence"),
            None,
            "The same training with one key changed; docs/reproduce.md says which.",
        ),
        Comparison(
            f"{setting}_sequential",
            f"{own.title}: accuracy first, then confidence",
            dict.fromkeys(["rlvr", "sequential", "coca"]) if "sequential" in present else {},
            _FIGURES,
            None,
            "On held-out questions, after all training; `sequential` trains for twice as many steps.",
        ),
    ]
    chosen = []
    for comparison in possible:
        methods = {m: paper for m, paper in comparison.methods.items() if m in present}
        if len(methods) > 1:
            chosen.append(Comparison(**{**vars(comparison), "methods": methods}))
    return chosen


@dataclass(frozen=True)
class Entry:
    """One number of a comparison: over our seeds, and the paper's (NaN where it prints none)."""

    method: str
    category: str
    metric: str
    ours: Spread
    paper: float


def entries(results: Results, setting: str, comparison: Comparison) -> list[Entry]:
    """All numbers of a comparison, method by method."""
    found = []
    for method, theirs in comparison.methods.items():
        seeds = results.seeds(setting, method)
        for metric in comparison.metrics:
            for category in results.categories(setting):
                values = [results.value(setting, method, seed, category, metric) for seed in seeds]
                paper = _published(comparison.paper_setting, theirs, metric, category)
                found.append(Entry(method, category, metric, spread(values), paper))
    return found


def comparison_table(comparison: Comparison, numbers: list[Entry]) -> Table:
    """Rows: method and metric; columns: our categories, then the paper's."""
    categories = list(dict.fromkeys(e.category for e in numbers))
    by_key = {(e.method, e.metric, e.category): e for e in numbers}
    with_paper = any(not math.isnan(e.paper) for e in numbers)
    header = ["method", "metric", *categories, *(f"paper: {c}" for c in categories if with_paper)]
    rows = []
    for method in comparison.methods:
        for metric in comparison.metrics:
            row = [by_key[method, metric, c] for c in categories]
            arrow = {1: " ↑", -1: " ↓", 0: ""}[metric_info(metric).better]
            theirs = [show(metric, e.paper) for e in row if with_paper]
            rows.append((method, metric_info(metric).label + arrow, *(e.ours.show(metric) for e in row), *theirs))
    long_rows: list[tuple[str | float, ...]] = [
        (e.method, e.category, e.metric, e.ours.mean, e.ours.deviation, *_padded(e.ours.values, numbers), e.paper)
        for e in numbers
    ]
    seeds = max((len(e.ours.values) for e in numbers), default=0)
    long_header = ("method", "category", "metric", "mean", "deviation", *(f"value_{i + 1}" for i in range(seeds)))
    return Table(
        comparison.name, comparison.title, comparison.note, tuple(header), rows, (*long_header, "paper"), long_rows
    )


def _padded(values: tuple[float, ...], numbers: list[Entry]) -> tuple[float, ...]:
    return values + (math.nan,) * (max(len(e.ours.values) for e in numbers) - len(values))


def _published(setting: str | None, method: str | None, metric: str, category: str) -> float:
    if setting is None or method is None:
        return math.nan
    try:
        return published(setting, method, metric, category)
    except ConfigError:
        return math.nan
