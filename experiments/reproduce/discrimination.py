"""Discrimination pooled and within families of questions, and learning curves, where a question has several answers."""

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
from matplotlib.figure import Figure

from coca_mindspeed.evaluation.metrics import UNDEFINED, calibration_metrics
from coca_mindspeed.evaluation.plots import line_style, new_figure, plot_text, tidy
from coca_mindspeed.evaluation.predictions import Prediction, gradable, outcomes
from experiments.answers import read_answers, read_as
from experiments.reproduce.plan import Plan
from experiments.reproduce.results import Results
from experiments.reproduce.tables import Table

Floats = npt.NDArray[np.float64]
_REPLICATES = 1000
_WITHIN = (
    "*Within*: mean of the families' AUROCs, weighted by questions; 0.5 if a model knows only the family. "
    "*Expectation*: AUROC of the expected confidence; the other columns are of one stated draw."
)
# Column -> reading, and whether AUROC is within families.
_AUROCS = {
    "AUROC": ("draw", False),
    "AUROC, greedy": ("greedy", False),
    "AUROC, expectation": ("expectation", False),
    "within": ("draw", True),
    "within, expectation": ("expectation", True),
}
_FAMILY_MEAN = "AUROC, family mean"
_PANELS = ("accuracy", "ECE", *(name for name in _AUROCS if "greedy" not in name))


def auroc(confidence: Floats, correct: npt.NDArray[np.bool_], weights: Floats) -> Floats:
    """AUROC ``[r]`` under each weighting ``[r, n]`` of n answers; NaN where all are right or all wrong."""
    values, place = np.unique(confidence, return_inverse=True)
    one_hot = np.eye(len(values))[place]
    right, wrong = weights[:, correct] @ one_hot[correct], weights[:, ~correct] @ one_hot[~correct]
    below = wrong.cumsum(axis=1) - wrong / 2
    with np.errstate(invalid="ignore"):
        return np.asarray((right * below).sum(axis=1) / (right.sum(axis=1) * wrong.sum(axis=1)))


def statistics(predictions: Sequence[Prediction], draws: Mapping[tuple[str, str], Floats]) -> dict[str, Floats]:
    """Accuracy, ECE (of all answers once) and the AUROCs ``[r]``; ``draws`` are weights ``[r]`` of each question.

    One more AUROC is that of a model that states each family's true success rate.
    """
    predictions = [p for p in gradable(predictions) if (p.dataset, p.id) in draws]
    data = outcomes(predictions)
    weights = np.stack([draws[p.dataset, p.id] for p in predictions], axis=1)
    ece = calibration_metrics(data.confidence, data.correct).values["ece"]
    found = {"accuracy": weights @ data.correct / weights.sum(axis=1), "ECE": np.full(len(weights), ece)}
    for name, (reading, within) in _AUROCS.items():
        read = [p for p in read_as(predictions, reading) if p.confidence is not None]
        families = list(dict.fromkeys(p.dataset for p in read)) if within else [None]
        total: Floats = np.zeros(len(weights))
        count: Floats = np.zeros(len(weights))
        for family in families:
            rows = [p for p in read if family in (None, p.dataset)]
            if not rows:
                continue
            own = outcomes(rows)
            value = auroc(own.confidence, own.correct, np.stack([draws[p.dataset, p.id] for p in rows], axis=1))
            size = len({(p.dataset, p.id) for p in rows})
            total = total + np.nan_to_num(value) * size
            count = count + ~np.isnan(value) * size
        with np.errstate(invalid="ignore"):
            found[name] = total / count
    names = np.array([p.dataset for p in predictions])
    rates = {name: float(data.correct[names == name].mean()) for name in names}
    found[_FAMILY_MEAN] = auroc(np.array([rates[name] for name in names]), data.correct, weights)
    return found


def bootstrap_weights(predictions: Sequence[Prediction], replicates: int) -> dict[tuple[str, str], Floats]:
    """Weights ``[1 + replicates]`` of each question: 1, then how often the bootstrap draws it within its family."""
    random, found = np.random.default_rng(0), {}
    questions = sorted({(p.dataset, p.id) for p in predictions})
    for family in sorted({dataset for dataset, _ in questions}):
        own = [key for key in questions if key[0] == family]
        counts = random.multinomial(len(own), np.full(len(own), 1 / len(own)), size=replicates)
        for key, column in zip(own, counts.T, strict=True):
            found[key] = np.concatenate([[1.0], column])
    return found


def _mean_over_seeds(results: Results, setting: str, method: str, replicates: int) -> dict[str, Floats]:
    """Statistics of a method on the first category's questions, averaged over its seeds."""
    category = results.categories(setting)[0]
    by_seed = []
    for seed in results.seeds(setting, method):
        rows = [p for p in results.jobs[setting, method, seed].predictions(results.output) if p.category == category]
        by_seed.append(statistics(rows, bootstrap_weights(rows, replicates)))
    return {name: np.mean([each[name] for each in by_seed], axis=0) for name in by_seed[0]}


def _methods(results: Results, plan: Plan, setting: str) -> list[str]:
    """Finished methods; none unless questions have several answers."""
    own = plan.settings[setting]
    found = [m for m in (*own.baselines, *own.trained) if results.seeds(setting, m)]
    one = [results.jobs[setting, m, results.seeds(setting, m)[0]].predictions(results.output) for m in found[-1:]]
    return found if any(p.sample for predictions in one for p in predictions) else []


def discrimination_tables(results: Results, plan: Plan, setting: str) -> list[Table]:
    """Each method on held-out questions of the trained families, and differences of ``coca`` to the others."""
    methods = _methods(results, plan, setting)
    if not methods:
        return []
    found = {method: _mean_over_seeds(results, setting, method, _REPLICATES) for method in methods}
    columns = ("accuracy", "ECE", *_AUROCS)
    title, category = plan.settings[setting].title, results.categories(setting)[0]
    note = (
        f"Held-out questions of the {category} families, means over seeds. Intervals: 95% of {_REPLICATES} bootstrap "
        f"replicates over questions within families; ECE has none. {_WITHIN}"
    )
    tables = [_table(f"{setting}_discrimination", f"{title}: discrimination", note, columns, found)]
    if "coca" in found and len(found) > 1:
        differences = {
            f"coca - {method}": {name: found["coca"][name] - other[name] for name in columns}
            for method, other in found.items()
            if method != "coca"
        }
        note = f"The same, paired by question; the intervals are not corrected for their number. {_WITHIN}"
        name = f"{setting}_discrimination_differences"
        tables.append(_table(name, f"{title}: differences in discrimination", note, columns, differences, signed=True))
    return tables


def _table(
    name: str,
    title: str,
    note: str,
    columns: Sequence[str],
    found: Mapping[str, Mapping[str, Floats]],
    *,
    signed: bool = False,
) -> Table:
    sign = "+" if signed else ""
    rows = [(m, *(_shown(of[c], bounds=c != "ECE", sign=sign) for c in columns)) for m, of in found.items()]
    csv_rows: list[tuple[str | float, ...]] = [(m, *_with_bounds(of, columns)) for m, of in found.items()]
    return Table(name, title, note, ("", *columns), rows, ("", *_bounded(columns)), csv_rows)


def _shown(values: Floats, *, bounds: bool, sign: str = "") -> str:
    """A statistic, with its interval where ``bounds``."""
    if math.isnan(values[0]):
        return UNDEFINED
    low, high = _interval(values)
    return f"{values[0]:{sign}.3f}" + (f" ({low:{sign}.3f} to {high:{sign}.3f})" if bounds else "")


def _bounded(columns: Sequence[str]) -> list[str]:
    """The columns of :func:`_with_bounds`."""
    return [f"{column}{part}" for column in columns for part in ("", " low", " high")]


def _with_bounds(of: Mapping[str, Floats], columns: Sequence[str]) -> list[float]:
    return [value for column in columns for value in (float(of[column][0]), *_interval(of[column]))]


def _interval(values: Floats) -> tuple[float, float]:
    low, high = np.nanquantile(values[1:], [0.025, 0.975]) if not np.isnan(values).all() else (math.nan, math.nan)
    return float(low), float(high)


def _evaluations(directory: Path) -> Iterator[tuple[int, Path]]:
    """Step and predictions of the evaluations of a run, the one before it as step 0."""
    if (before := directory / "predictions_before.jsonl").exists():
        yield 0, before
    for path in sorted((directory / "evaluations").glob("step_*.jsonl")):
        yield int(path.stem.removeprefix("step_")), path


@cache
def _statistics_of(path: Path) -> dict[str, Floats]:
    rows = read_answers(path)
    return statistics(rows, bootstrap_weights(rows, _REPLICATES))


def learning_curves(results: Results, plan: Plan, setting: str) -> tuple[Table, Figure] | None:
    """Statistics of the evaluations while training, of unfinished runs too; None without evaluations."""
    columns = ("accuracy", "ECE", *_AUROCS, _FAMILY_MEAN)
    points: dict[tuple[str, int], dict[int, dict[str, Floats]]] = {}  # method and step -> statistics of each seed
    for job in sorted((*results.jobs.values(), *results.unfinished), key=lambda job: job.seed):
        if job.setting == setting and job.kind == "trained":
            for step, path in _evaluations(job.directory(results.output) / "run"):
                points.setdefault((job.name, step), {})[job.seed] = _statistics_of(path)
    methods = [method for method in plan.settings[setting].trained if any(name == method for name, _ in points)]
    if not methods:
        return None
    ordered = sorted(points, key=lambda key: (methods.index(key[0]), key[1]))
    means = {key: {c: np.mean([of[c] for of in points[key].values()], axis=0) for c in columns} for key in ordered}
    figure, grid = new_figure(2, 3, (11.0, 6.0))
    panels = dict(zip(_PANELS, (axes for row in grid for axes in row), strict=True))
    for index, method in enumerate(methods):
        steps = [step for other, step in ordered if other == method]
        for name, axes in panels.items():
            values = [float(means[method, s][name][0]) for s in steps]
            axes.plot(steps, values, **line_style(index), label=plot_text(method))

    rows = [
        (
            method,
            str(step),
            ", ".join(map(str, points[method, step])),
            *(_shown(means[method, step][c], bounds=c in ("AUROC", "within")) for c in columns),
        )
        for method, step in ordered
    ]
    csv_rows: list[tuple[str | float, ...]] = [
        (method, seed, step, *_with_bounds(of, columns))
        for method, step in ordered
        for seed, of in points[method, step].items()
    ]
    for name, axes in panels.items():
        tidy(axes, xlabel="training step", ylabel=name)
    panels["accuracy"].legend(fontsize=7)
    table = Table(
        f"{setting}_learning_curves",
        f"{plan.settings[setting].title}: learning curves",
        f"Evaluations of held-out questions of the trained families, means over the seeds that got so far, with the "
        f"95% intervals of the two AUROCs of a draw (bootstrap over questions within families). {_WITHIN} *Family "
        "mean*: AUROC of each family's true success rate, as if it were the confidence.",
        ("method", "step", "seeds", *columns),
        rows,
        ("method", "seed", "step", *_bounded(columns)),
        csv_rows,
    )
    return table, figure
