"""Compare confidences with and without division by the group's deviation: ``python -m experiments.deviation ARCHIVE``.

The archive is one of :mod:`experiments.forms`, of the plan ``deviation``; the rule is in
``experiments/results/deviation/README.md``.
"""

import argparse
import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from coca_mindspeed.evaluation.intervals import Interval
from coca_mindspeed.utils.console import markdown_table, print_text
from experiments.forms import FormRun, by_form, read_archive
from experiments.reproduce.results import mean_interval

MEASURES = ("gap", "excess")
_LEAST_ACCURACY = 0.1  # below, the answers got lost
_LEAST_SEEDS = 3
_SMALL = 0.05  # an interval within minus and plus this shows no difference


def measures(run: FormRun) -> dict[str, float]:
    """``gap``: stated minus right; ``excess``: towards 0 or 1, within each kind of question.  Over valid answers."""
    valid = ~np.isnan(run.confidence)
    stated, right, kinds = run.confidence[valid], run.correct[valid], run.kinds[valid]
    toward = []
    for kind in np.unique(kinds):
        rate = right[kinds == kind].mean()
        toward.append((stated[kinds == kind].mean() - rate) * (1 if rate >= 0.5 else -1))
    return {"gap": float(stated.mean() - right.mean()), "excess": float(np.mean(toward))}


def verdict(difference: Interval, seeds: int) -> str:
    """The rule's outcome for a method."""
    if seeds < _LEAST_SEEDS or math.isnan(difference.low):
        return "not decided"
    if difference.low > 0:
        return "overconfident by the division"
    if difference.high < 0:
        return "underconfident by the division"
    return "no difference" if difference.low >= -_SMALL and difference.high <= _SMALL else "not decided"


def differences(forms: Mapping[str, Mapping[int, FormRun]]) -> dict[tuple[str, str], tuple[Interval, int, str]]:
    """(method, measure) -> difference of ``group`` minus ``none``, number of pairs of seeds, verdict."""
    result = {}
    for method in dict.fromkeys(name.split(",")[0] for name in forms):
        divided, undivided = (forms.get(f"{method}, {scale}", {}) for scale in ("group", "none"))
        kept = [
            (divided[seed], undivided[seed])
            for seed in sorted(divided.keys() & undivided.keys())
            if min(divided[seed].correct.mean(), undivided[seed].correct.mean()) >= _LEAST_ACCURACY
        ]
        for measure in MEASURES if kept else ():
            interval = mean_interval([measures(a)[measure] - measures(b)[measure] for a, b in kept])
            result[method, measure] = interval, len(kept), verdict(interval, len(kept))
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("archive", type=Path, metavar="ARCHIVE", help="of experiments.forms")
    forms = by_form(read_archive(parser.parse_args().archive))
    rows = [
        (
            name,
            str(seed),
            *(f"{value:.3f}" for value in (run.row["accuracy"], run.row["AUROC"], *measures(run).values())),
        )
        for name, of_seeds in forms.items()
        for seed, run in of_seeds.items()
    ]
    outcomes = [
        (method, measure, str(seeds), f"{i.estimate:+.3f} ({i.low:+.3f} to {i.high:+.3f})", outcome)
        for (method, measure), (i, seeds, outcome) in differences(forms).items()
    ]
    header = ("method", "measure", "seeds", "group - none (95%)", "outcome")
    runs_header = ("arm", "seed", "accuracy", "AUROC", *MEASURES)
    print_text(f"{markdown_table(header, outcomes)}\n\n{markdown_table(runs_header, rows)}")


if __name__ == "__main__":
    main()
