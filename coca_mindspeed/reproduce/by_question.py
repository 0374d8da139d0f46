"""Methods beside each other question by question: what a few seeds can tell, where claims over seeds cannot."""

import math
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from coca_mindspeed.evaluation.intervals.bounds import Interval
from coca_mindspeed.evaluation.intervals.estimates import Estimates, paired_intervals
from coca_mindspeed.evaluation.metrics.specs import QUALITY_METRICS, UNDEFINED, metric_spec
from coca_mindspeed.evaluation.predictions import Prediction, gradable, outcomes
from coca_mindspeed.reproduce.comparisons import STARTED
from coca_mindspeed.reproduce.plan import Plan
from coca_mindspeed.reproduce.results import Results
from coca_mindspeed.reproduce.table import Table

_PAIRS = (
    *(("coca", rival) for rival in ("instruct", "rlvr", "joint", "rlcr")),
    *((STARTED, rival) for rival in ("instruct", "coca")),
)
_LEVEL = 0.95


def by_question_table(results: Results, plan: Plan, setting: str) -> Table | None:
    """Differences over all questions of a category, pooled over its data sets and over the seeds that both have.

    Their intervals hold together: each has the error shared out among all of the table.  They are clustered by
    question, over seeds too, and hold for these trained models and other such questions, not for other trainings.
    """
    pairs = [pair for pair in _PAIRS if results.seeds(setting, *pair)]
    categories = results.categories(setting)
    count = len(pairs) * len(categories) * len(QUALITY_METRICS)
    if not count:
        return None
    level = 1 - (1 - _LEVEL) / count
    rows: list[tuple[str, ...]] = []
    csv_rows: list[tuple[str | float, ...]] = []
    for method, rival in pairs:
        for category, size, found in _differences(results, setting, method, rival, categories, level):
            rows.append((f"{method} - {rival}", category, str(size), *(_shown(found[m]) for m in QUALITY_METRICS)))
            numbers = (v for m in QUALITY_METRICS for v in (found[m].estimate, found[m].low, found[m].high))
            csv_rows.append((method, rival, category, float(size), *numbers))
    columns = [f"{m}_{part}" for m in QUALITY_METRICS for part in ("difference", "low", "high")]
    return Table(
        f"{setting}_by_question",
        f"{plan.settings[setting].title}: question by question",
        f"Differences on held-out questions, pooled over a category's data sets and over seeds, with intervals of "
        f"which all {count} hold together with {_LEVEL:.0%} (Bonferroni). They are over questions, clustered over "
        "seeds, for the models that were trained here; what another training would give, the claims over seeds say. "
        "Pooled AUROC also tells data sets apart; the tables of means over data sets do not.",
        ("", "category", "questions", *(metric_spec(m).heading for m in QUALITY_METRICS)),
        rows,
        ("method", "rival", "category", "questions", *columns),
        csv_rows,
    )


def _differences(
    results: Results, setting: str, method: str, rival: str, categories: Sequence[str], level: float
) -> Iterator[tuple[str, int, dict[str, Interval]]]:
    seeds = results.seeds(setting, method, rival)
    ours, theirs = (
        {
            (seed, *p.key): p
            for seed in seeds
            for p in gradable(results.cells[setting, m, seed].predictions(results.output))
        }
        for m in (method, rival)
    )
    both = [key for key in ours if key in theirs]
    for category in categories:
        keys = [key for key in both if ours[key].category == category]
        if not keys:
            continue
        questions = np.array([f"{dataset}\0{name}" for _, dataset, name, *_ in keys])
        first, second = (_estimates([said[key] for key in keys], questions) for said in (theirs, ours))
        yield category, len(set(questions)), paired_intervals(first, second, level)


def _estimates(predictions: Sequence[Prediction], questions: npt.NDArray[np.str_]) -> Estimates:
    return Estimates(outcomes(predictions), questions=questions)


def _shown(interval: Interval) -> str:
    if math.isnan(interval.estimate):
        return UNDEFINED
    bounds = "" if math.isnan(interval.low) else f" ({interval.low:+.3f} to {interval.high:+.3f})"
    return f"{interval.estimate:+.3f}{bounds}"
