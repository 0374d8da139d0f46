"""Tables of a reproduction: methods beside each other and the paper's figures, and paired tests over questions."""

import csv
import io
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from matplotlib.figure import Figure

from coca_mindspeed.evaluation.intervals import Estimates, Interval, paired_intervals
from coca_mindspeed.evaluation.metrics import (
    METRIC_SPECS,
    QUALITY_METRICS,
    UNDEFINED,
    UNDER_CALIBRATION_LABEL,
    show,
    show_range,
)
from coca_mindspeed.evaluation.plots import BLUE, GREY, VERMILION, new_figure, plot_text, tidy
from coca_mindspeed.evaluation.predictions import gradable, outcomes
from experiments.paper.figures import paper, printed, published
from experiments.reproduce.plan import Plan
from experiments.reproduce.results import Results, Spread, mean_interval, spread

_NOT_RUN = "not run"
_PAIRS = [("coca", rival) for rival in ("instruct", "rlvr", "joint", "rlcr")]
_LEVEL = 0.95


@dataclass(frozen=True)
class Table:
    """A table: as it is printed, and full values for the CSV file (by default the printed cells)."""

    name: str
    title: str
    note: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    csv_header: Sequence[str] | None = None
    csv_rows: Sequence[Sequence[str | float]] | None = None

    def csv(self) -> str:
        """The CSV file; NaN is an empty cell."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(self.header if self.csv_header is None else self.csv_header)
        for row in self.rows if self.csv_rows is None else self.csv_rows:
            writer.writerow(["" if isinstance(v, float) and math.isnan(v) else v for v in row])
        return text.getvalue()


@dataclass(frozen=True)
class Comparison:
    """Methods beside each other.

    Attributes:
        name: of the files.
        title: of the table.
        methods: our name -> the paper's name, or None.
        metrics: metrics in the table.
        paper_setting: the paper's table, or None.
        note: below the title.
        intervals: whether the table is that of :func:`interval_table`.
    """

    name: str
    title: str
    methods: Mapping[str, str | None]
    metrics: tuple[str, ...]
    paper_setting: str | None
    note: str
    intervals: bool = False


def comparisons(plan: Plan, setting: str) -> list[Comparison]:
    """The comparisons of which the setting has at least two methods."""
    own, paper_setting = plan.settings[setting], plan.paper_setting
    present = [*own.baselines, *own.trained]
    main = ("instruct", "rlvr", "rlvr+question_prob", "rlvr+assessor", "rlvr+probe", "coca", "coca+family_mean")
    possible = [
        Comparison(
            f"{setting}_main",
            f"{own.title}: methods that state the confidence first",
            {m: m for m in main},
            QUALITY_METRICS,
            paper_setting,
            f"The paper's figures are those of {paper_setting}.",
        ),
        Comparison(
            f"{setting}_answer_first",
            f"{own.title}: against methods that answer first",
            {m: m for m in ("majority_voting", "rlcr", "coca")},
            (*QUALITY_METRICS, "tokens_to_confidence"),
            "answer_first/qwen2.5-7b",
            "TTC: tokens until the confidence is known. The paper has no ECE or Brier here.",
        ),
        Comparison(
            f"{setting}_segment_against_joint",
            f"{own.title}: segment rewards against one summed reward",
            {"coca": "segment", "joint": "joint"},
            QUALITY_METRICS,
            "ablation/qwen2.5-7b",
            "`coca` rewards each segment separately; `joint` rewards all tokens with the sum.",
        ),
        Comparison(
            f"{setting}_choices",
            f"{own.title}: choices that the paper leaves open",
            dict.fromkeys(["coca", *(m for m in present if m.startswith("coca, "))]),
            (*QUALITY_METRICS, "success_rate", "tokens_to_confidence"),
            None,
            "The same training with one key changed (docs/reproduce.md).",
        ),
        Comparison(
            f"{setting}_sequential",
            f"{own.title}: accuracy first, then confidence",
            dict.fromkeys(["rlvr", "sequential", "coca"]) if "sequential" in present else {},
            QUALITY_METRICS,
            None,
            "On held-out questions after all training; `sequential` trains for twice as many steps.",
        ),
        all_methods(plan, setting),
    ]
    found = [replace(c, methods={m: name for m, name in c.methods.items() if m in present}) for c in possible]
    return [comparison for comparison in found if len(comparison.methods) > 1]


def all_methods(plan: Plan, setting: str) -> Comparison:
    """Every method beside the others; none if all have a place in another comparison."""
    own = plan.settings[setting]
    known = {"coca", "rlvr", "joint", "sequential", "rlcr"}
    more = any(m not in known and not m.startswith("coca, ") for m in own.trained)
    return Comparison(
        f"{setting}_methods",
        f"{own.title}: all methods",
        dict.fromkeys([*own.baselines, *own.trained] if more else []),
        QUALITY_METRICS,
        None,
        f"Means over seeds, intervals: {_LEVEL:.0%} of Student's t.",
        intervals=True,
    )


@dataclass(frozen=True)
class Entry:
    """One figure of a comparison.

    Attributes:
        method: our name.
        category: of the questions.
        metric: name of the metric.
        by_seed: seed -> value; NaN where undefined or not finished.
        paper: the paper's figure, or NaN.
        calibrated: for ECE: seed -> ECE under perfect calibration; otherwise empty.
        finished: number of finished seeds.
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
        return spread(self.by_seed.values())

    def show(self, values: Mapping[int, float]) -> str:
        """``by_seed`` or ``calibrated`` as the table prints it."""
        return spread(values.values()).show(self.metric) if self.finished else _NOT_RUN


def entries(results: Results, setting: str, comparison: Comparison) -> list[Entry]:
    """All figures of a comparison, method by method."""
    found = []
    for method, name in comparison.methods.items():
        requested, finished = results.requested_seeds(setting, method), set(results.seeds(setting, method))
        for metric in comparison.metrics:
            for category in results.categories(setting):
                values = dict.fromkeys(requested, math.nan)
                calibrated = dict.fromkeys(requested if metric == "ece" else (), math.nan)
                for seed in finished:
                    values[seed] = results.value(setting, method, seed, category, metric)
                    if metric == "ece":
                        calibrated[seed] = results.calibrated_ece(setting, method, seed, category)
                theirs = _published(comparison.paper_setting, name, metric, category)
                found.append(Entry(method, category, metric, values, theirs, calibrated, len(finished)))
    return found


def _published(setting: str | None, method: str | None, metric: str, category: str) -> float:
    if setting is None or method is None or method not in paper().per_dataset[setting]:
        return math.nan
    return published(setting, method, metric, category)


def comparison_table(comparison: Comparison, numbers: Sequence[Entry]) -> Table:
    """Rows: method and metric; columns: our categories, then the paper's."""
    categories = list(dict.fromkeys(e.category for e in numbers))
    by_key = {(e.method, e.metric, e.category): e for e in numbers}
    with_paper = any(not math.isnan(e.paper) for e in numbers)
    header = ("method", "metric", *categories, *(f"paper: {c}" for c in categories if with_paper))
    rows = []
    for method in comparison.methods:
        for metric in comparison.metrics:
            row = [by_key[method, metric, c] for c in categories]
            theirs = [printed(metric, e.paper) for e in row if with_paper]
            rows.append((method, METRIC_SPECS[metric].heading, *(e.show(e.by_seed) for e in row), *theirs))
            if metric == "ece":
                calibrated = [e.show(e.calibrated) for e in row]
                rows.append((method, UNDER_CALIBRATION_LABEL, *calibrated, *("" for _ in theirs)))
    seeds = sorted({seed for e in numbers for seed in e.by_seed})
    csv_rows = []
    for e in numbers:
        csv_rows.append(_csv_row(e, e.metric, e.by_seed, seeds, e.paper))
        if e.calibrated:
            csv_rows.append(_csv_row(e, "ece_if_calibrated", e.calibrated, seeds, math.nan))
    names = (f"seed_{seed}" for seed in seeds)
    csv_header = ("method", "category", "metric", "mean", "deviation", "n", *names, "paper")
    return Table(comparison.name, comparison.title, comparison.note, header, rows, csv_header, csv_rows)


def interval_table(comparison: Comparison, numbers: Sequence[Entry]) -> Table:
    """Rows: methods; columns: the metrics of the first category, which is trained, with intervals over seeds."""
    category = numbers[0].category
    by_key = {(e.method, e.metric): e for e in numbers if e.category == category}
    header = ("", *(METRIC_SPECS[metric].heading for metric in comparison.metrics))
    rows = [(m, *(_with_interval(by_key[m, metric]) for metric in comparison.metrics)) for m in comparison.methods]
    full = comparison_table(comparison, numbers)
    note = f"{comparison.note} Questions: {category}; the CSV file has the others."
    return Table(comparison.name, comparison.title, note, header, rows, full.csv_header, full.csv_rows)


def _with_interval(entry: Entry) -> str:
    """``0.085 (0.061 to 0.109)``, with the number of seeds on which it is defined if it is smaller."""
    if not entry.finished:
        return _NOT_RUN
    of = mean_interval(list(entry.by_seed.values()))
    low, high = (float(np.clip(bound, 0.0, 1.0)) for bound in (of.low, of.high))  # NaN stays
    bounds = show_range(entry.metric, low, high)
    few = "" if len(entry.ours.values) == entry.finished else f", n = {len(entry.ours.values)}"
    return f"{show(entry.metric, of.estimate)}{f' ({bounds}{few})' if bounds else few}"


def _csv_row(
    entry: Entry, metric: str, by_seed: Mapping[int, float], seeds: Sequence[int], theirs: float
) -> tuple[str | float, ...]:
    of = spread(by_seed.values())
    values = (by_seed.get(seed, math.nan) for seed in seeds)
    return (entry.method, entry.category, metric, of.mean, of.deviation, len(of.values), *values, theirs)


def dot_chart(numbers: Sequence[Entry]) -> Figure:
    """A panel per metric and category: seeds, their mean, the paper's figure and the ECE under perfect calibration."""
    metrics = list(dict.fromkeys(e.metric for e in numbers))
    categories = list(dict.fromkeys(e.category for e in numbers))
    methods = list(dict.fromkeys(e.method for e in numbers))
    figure, grid = new_figure(len(metrics), len(categories), (3.4 * len(categories) + 1.2, 1.9 * len(metrics) + 0.8))
    for row, metric in zip(grid, metrics, strict=True):
        info = METRIC_SPECS[metric]
        for axes, category in zip(row, categories, strict=True):
            for e in (e for e in numbers if (e.metric, e.category) == (metric, category)):
                x = methods.index(e.method)
                axes.plot([x] * len(e.ours.values), [v * info.scale for v in e.ours.values], "o", color=BLUE, alpha=0.6)
                means = ((e.ours.mean, BLUE, "-"), (spread(e.calibrated.values()).mean, GREY, ":"))
                for mean, color, style in means:
                    if not math.isnan(mean):
                        axes.hlines(mean * info.scale, x - 0.25, x + 0.25, color=color, linewidth=2, linestyle=style)
                if not math.isnan(e.paper):
                    axes.plot(x, e.paper * info.scale, "D", color=VERMILION, fillstyle="none", markersize=6)
            tidy(axes, xlabel="", ylabel=info.label if category == categories[0] else "")
            axes.set_xticks(range(len(methods)), list(map(plot_text, methods)), rotation=30, ha="right", fontsize=7)
            axes.set_xlim(-0.6, len(methods) - 0.4)
            if row is grid[0]:
                axes.set_title(plot_text(category), fontsize=10)
    legend = ["dots: seeds, bar: mean"]
    if any(not math.isnan(e.paper) for e in numbers):
        legend.append("diamond: the paper's model")
    if "ece" in metrics:
        legend.append("dotted: ECE if calibrated")
    figure.suptitle("; ".join(legend), fontsize=8)
    return figure


def paired_tests_table(results: Results, plan: Plan, setting: str) -> Table | None:
    """Differences over a category's questions, pooled over its data sets and over the seeds that both methods have.

    The intervals are clustered by question and hold jointly (Bonferroni), for these trained models.
    """
    pairs = [pair for pair in _PAIRS if results.seeds(setting, *pair)]
    categories = results.categories(setting)
    count = len(pairs) * len(categories) * len(QUALITY_METRICS)
    if not count:
        return None
    rows: list[tuple[str, ...]] = []
    csv_rows: list[tuple[str | float, ...]] = []
    for method, rival in pairs:
        for category, size, found in _differences(results, setting, method, rival, 1 - (1 - _LEVEL) / count):
            rows.append((f"{method} - {rival}", category, str(size), *(_show(found[m]) for m in QUALITY_METRICS)))
            numbers = (v for m in QUALITY_METRICS for v in (found[m].estimate, found[m].low, found[m].high))
            csv_rows.append((method, rival, category, float(size), *numbers))
    columns = [f"{m}_{part}" for m in QUALITY_METRICS for part in ("difference", "low", "high")]
    return Table(
        f"{setting}_paired_tests",
        f"{plan.settings[setting].title}: paired tests over questions",
        f"Differences on held-out questions, pooled over a category's data sets and over seeds. All {count} intervals "
        f"hold jointly with {_LEVEL:.0%} (Bonferroni), clustered by question, for these trained models; the claims "
        "over seeds are about other trainings. Pooled AUROC also depends on differences between data sets.",
        ("", "category", "questions", *(METRIC_SPECS[m].heading for m in QUALITY_METRICS)),
        rows,
        ("method", "rival", "category", "questions", *columns),
        csv_rows,
    )


def _differences(
    results: Results, setting: str, method: str, rival: str, level: float
) -> Iterator[tuple[str, int, dict[str, Interval]]]:
    seeds = results.seeds(setting, method, rival)
    ours, theirs = (
        {
            (seed, *p.key): p
            for seed in seeds
            for p in gradable(results.jobs[setting, m, seed].predictions(results.output))
        }
        for m in (method, rival)
    )
    for category in results.categories(setting):
        keys = [key for key in ours if key in theirs and ours[key].category == category]
        if keys:
            questions = np.array([f"{dataset}\0{name}" for _, dataset, name, *_ in keys])
            first, second = (
                Estimates(outcomes([of[key] for key in keys]), questions=questions) for of in (theirs, ours)
            )
            yield category, len(set(questions)), paired_intervals(first, second, level)


def _show(interval: Interval) -> str:
    if math.isnan(interval.estimate):
        return UNDEFINED
    bounds = "" if math.isnan(interval.low) else f" ({interval.low:+.3f} to {interval.high:+.3f})"
    return f"{interval.estimate:+.3f}{bounds}"
