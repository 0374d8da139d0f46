"""The paper's tables with our numbers in them: which methods stand beside each other, and what the paper has there."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from coca_mindspeed.evaluation.metrics.specs import QUALITY_METRICS, UNDER_CALIBRATION_LABEL, metric_spec
from coca_mindspeed.evaluation.paper.published import paper, printed, published
from coca_mindspeed.reproduce.plan import Plan
from coca_mindspeed.reproduce.results import Results, Spread, spread
from coca_mindspeed.reproduce.table import Table

STARTED = "coca, started"  # behind a supervised start of the confidences, which the paper has not (docs/training.md)


NOT_RUN = "not run"  # in the place of a number of which no seed is finished


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
            {**{m: m for m in main}, STARTED: None},
            QUALITY_METRICS,
            paper,
            f"The paper's figures, where it has any for such questions, are those of {paper}.",
        ),
        Comparison(
            f"{setting}_answer_first",
            f"{own.title}: against methods that answer first",
            {m: m for m in ("majority_voting", "rlcr", "coca")},
            (*QUALITY_METRICS, "tokens_to_confidence"),
            "answer_first/qwen2.5-7b",
            "TTC: tokens until the confidence is known. The paper prints no ECE or Brier here.",
        ),
        Comparison(
            f"{setting}_segment_against_joint",
            f"{own.title}: rewards by segment against one summed reward",
            {"coca": "segment", "joint": "joint"},
            QUALITY_METRICS,
            "ablation/qwen2.5-7b",
            "`coca` rewards each segment by itself; `joint` rewards all tokens with the sum.",
        ),
        Comparison(
            f"{setting}_choices",
            f"{own.title}: choices that the paper leaves open",
            dict.fromkeys(["coca", *(m for m in present if m.startswith("coca, ") and m != STARTED)]),
            (*QUALITY_METRICS, "success_rate", "tokens_to_confidence"),
            None,
            "The same training with one key changed; docs/reproduce.md says which.",
        ),
        Comparison(
            f"{setting}_sequential",
            f"{own.title}: accuracy first, then confidence",
            dict.fromkeys(["rlvr", "sequential", "coca"]) if "sequential" in present else {},
            QUALITY_METRICS,
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
    """One number of a comparison: over our seeds, and the paper's (NaN where it prints none).

    Attributes:
        method: of the comparison.
        category: of the questions.
        metric: of the catalogue.
        by_seed: seed -> value, NaN where undefined, or where the seed is not finished.
        paper: the paper's.
        calibrated: seed -> for ECE, what a calibrated model with the same confidences would show; else empty.
        finished: how many of the seeds are.
    """

    method: str
    category: str
    metric: str
    by_seed: Mapping[int, float]
    paper: float
    calibrated: Mapping[int, float]
    finished: int

    @property
    def ours(self) -> Spread:
        return spread(list(self.by_seed.values()))

    def shown(self) -> str:
        """As the tables print it."""
        return self.ours.show(self.metric) if self.finished else NOT_RUN

    def shown_calibrated(self) -> str:
        """The ECE of a calibrated model, as the tables print it."""
        return spread(list(self.calibrated.values())).show(self.metric) if self.finished else NOT_RUN


def entries(results: Results, setting: str, comparison: Comparison) -> list[Entry]:
    """All numbers of a comparison, method by method."""
    found = []
    for method, theirs in comparison.methods.items():
        asked, finished = results.asked(setting, method), set(results.seeds(setting, method))
        for metric in comparison.metrics:
            for category in results.categories(setting):
                values = {
                    seed: results.value(setting, method, seed, category, metric) if seed in finished else math.nan
                    for seed in asked
                }
                paper = _published(comparison.paper_setting, theirs, metric, category)
                redrawn = {
                    seed: results.calibrated_ece(setting, method, seed, category) if seed in finished else math.nan
                    for seed in asked
                    if metric == "ece"
                }
                found.append(Entry(method, category, metric, values, paper, redrawn, len(finished)))
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
            theirs = [printed(metric, e.paper) for e in row if with_paper]
            rows.append((method, metric_spec(metric).heading, *(e.shown() for e in row), *theirs))
            if metric == "ece":
                redrawn = [e.shown_calibrated() for e in row]
                rows.append((method, UNDER_CALIBRATION_LABEL, *redrawn, *("" for _ in theirs)))
    seeds = sorted({seed for e in numbers for seed in e.by_seed})
    long_rows = []
    for e in numbers:
        long_rows.append(_long_row(e.method, e.category, e.metric, e.by_seed, seeds, e.paper))
        if e.calibrated:
            name = "ece_if_calibrated"
            long_rows.append(_long_row(e.method, e.category, name, e.calibrated, seeds, math.nan))
    named = (f"seed_{seed}" for seed in seeds)
    long_header = ("method", "category", "metric", "mean", "deviation", "n", *named, "paper")
    return Table(comparison.name, comparison.title, comparison.note, tuple(header), rows, long_header, long_rows)


def _long_row(
    method: str, category: str, metric: str, by_seed: Mapping[int, float], seeds: Sequence[int], paper: float
) -> tuple[str | float, ...]:
    of = spread(list(by_seed.values()))
    values = (by_seed.get(seed, math.nan) for seed in seeds)
    return (method, category, metric, of.mean, of.deviation, len(of.values), *values, paper)


def _published(setting: str | None, method: str | None, metric: str, category: str) -> float:
    if setting is None or method is None:
        return math.nan
    return published(setting, method, metric, category) if method in paper().per_dataset[setting] else math.nan
