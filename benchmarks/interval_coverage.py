"""How often the intervals of evaluation hold: ``python -m benchmarks.interval_coverage [--sets 1000]``.

Prints, for every law and number of predictions, the share of simulated sets whose interval holds the true value, and
the interval's mean width in parentheses.  The true value is that of the law (all questions), not of the drawn ones.
"""

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt

from coca_mindspeed.evaluation.intervals import Estimates, Floats, Interval, average_interval, paired_intervals
from coca_mindspeed.evaluation.predictions import GradedPredictions
from experiments.reproduce.results import mean_interval

Draw = Callable[[np.random.Generator, int], Floats]
Probability = Callable[[Floats], Floats]


@dataclass(frozen=True)
class Law:
    """How confidences are distributed, and how often an answer of each confidence is right."""

    confidence: Draw
    right: Probability

    def draw(self, rng: np.random.Generator, n: int) -> GradedPredictions:
        confidence = self.confidence(rng, n)
        return GradedPredictions(confidence, rng.random(n) < self.right(confidence), np.full(n, np.nan))


def _sure(rng: np.random.Generator, n: int) -> Floats:
    return np.where(rng.random(n) < 0.95, rng.uniform(0.9, 1, n), rng.random(n))


def _zigzag(s: Floats) -> Floats:
    return np.asarray(np.clip(s + np.where(np.floor(10 * s) % 2 == 0, 0.1, -0.1), 0, 1))


LAWS: Mapping[str, Law] = {
    "calibrated, spread": Law(lambda rng, n: rng.random(n), lambda s: s),
    "calibrated, tenths": Law(lambda rng, n: rng.integers(0, 11, n) / 10, lambda s: s),
    "calibrated, peaked": Law(lambda rng, n: rng.beta(30, 10, n), lambda s: s),
    "calibrated, at both ends": Law(lambda rng, n: rng.beta(0.3, 0.3, n), lambda s: s),
    "constant .7, right": Law(lambda rng, n: np.full(n, 0.7), lambda s: s),
    "constant .97, right": Law(lambda rng, n: np.full(n, 0.97), lambda s: s),
    "constant .9, wrong by .2": Law(lambda rng, n: np.full(n, 0.9), lambda s: s - 0.2),
    "sure, all right": Law(lambda rng, n: np.ones(n), np.ones_like),
    "sure, all wrong": Law(lambda rng, n: np.ones(n), np.zeros_like),
    "spread, all right": Law(lambda rng, n: rng.random(n), np.ones_like),
    "spread, all wrong": Law(lambda rng, n: rng.random(n), np.zeros_like),
    "over-confident by .03": Law(lambda rng, n: rng.uniform(0.03, 1, n), lambda s: s - 0.03),
    "p = s^2": Law(lambda rng, n: rng.random(n), np.square),
    "above .9, calibrated": Law(_sure, lambda s: s),
    "above .9, over-confident": Law(_sure, lambda s: 0.95 * s),
    "uninformative": Law(lambda rng, n: rng.random(n), lambda s: np.full_like(s, 0.5)),
    "rarely 0, all right": Law(lambda rng, n: np.where(rng.random(n) < 0.93, 1.0, 0.0), np.ones_like),
    "zigzag": Law(lambda rng, n: rng.random(n), _zigzag),
}
METRICS = ("accuracy", "auroc", "ece", "brier")
SIZES = (30, 200, 2000)


@cache
def truth(law: Law, *, draws: int = 400_000, seed: int = 99) -> dict[str, float]:
    """The metrics of all questions of a law, each confidence with its exact probability of being right.

    Monte Carlo in the confidences only; NaN where a metric is undefined or no single value is meant.
    """
    confidence = np.sort(law.confidence(np.random.default_rng(seed), draws))[::-1]
    right = law.right(confidence)
    index = np.searchsorted(np.arange(1, 11) / 10, confidence)
    gaps = np.bincount(index, weights=confidence - right, minlength=10)
    group = np.unique(-confidence, return_inverse=True)[1]
    group_right, group_wrong = np.bincount(group, weights=right), np.bincount(group, weights=1 - right)
    above = np.cumsum(group_wrong) - group_wrong / 2
    n_right, n_wrong = right.sum(), (1 - right).sum()
    return {
        "accuracy": float(right.mean()),
        "auroc": float(1 - (group_right * above).sum() / (n_right * n_wrong)) if min(n_right, n_wrong) else np.nan,
        "ece": float(np.abs(gaps).sum() / draws),
        "brier": float((right * (1 - confidence) ** 2 + (1 - right) * confidence**2).mean()),
    }


@dataclass
class Tally:
    """Coverage of one interval over simulated sets."""

    held: int = 0
    sets: int = 0
    width: float = 0.0

    def note(self, interval: Interval, true: float) -> None:
        """Count an interval; an undefined one is none, and a true value of NaN asks nothing."""
        if np.isnan(interval.low) or np.isnan(true):
            return
        self.sets += 1
        self.held += interval.low - 1e-4 <= true <= interval.high + 1e-4
        self.width += interval.high - interval.low

    @property
    def coverage(self) -> float:
        return self.held / self.sets if self.sets else float("nan")

    def __str__(self) -> str:
        return f"{100 * self.coverage:5.1f} ({self.width / self.sets:.3f})" if self.sets else "     --      "


def alone(law: Law, n: int, sets: int, metrics: tuple[str, ...], *, seed: int = 0) -> list[Tally]:
    """Coverage of each metric's interval on sets of n predictions."""
    true, tallies = truth(law), [Tally() for _ in metrics]
    rng = np.random.default_rng([seed, n])
    for each in range(sets):
        found = Estimates(law.draw(rng, n), seed=each)
        for metric, tally in zip(metrics, tallies, strict=True):
            tally.note(found.interval(metric), true[metric])
    return tallies


def paired(first: Law, second: Law, n: int, sets: int, metrics: tuple[str, ...], *, seed: int = 0) -> list[Tally]:
    """Coverage of differences of two methods on the same n questions, some of which are easy for both."""
    one, other, tallies = truth(first), truth(second), [Tally() for _ in metrics]
    rng = np.random.default_rng([seed, n])
    for each in range(sets):
        luck = rng.random(n)  # shared, so that the methods tend to be right together
        stated = [law.confidence(rng, n) for law in (first, second)]
        both = [
            Estimates(GradedPredictions(s, luck < law.right(s), np.full(n, np.nan)), seed=each)
            for s, law in zip(stated, (first, second), strict=True)
        ]
        found = paired_intervals(*both)
        for metric, tally in zip(metrics, tallies, strict=True):
            tally.note(found[metric], other[metric] - one[metric])
    return tallies


def averaged(laws: list[Law], n: int, sets: int, metrics: tuple[str, ...], *, seed: int = 0) -> list[Tally]:
    """Coverage of the plain mean over data sets, one for each law."""
    true, tallies = [truth(law) for law in laws], [Tally() for _ in metrics]
    rng = np.random.default_rng([seed, n])
    for each in range(sets):
        parts = [Estimates(law.draw(rng, n), seed=each) for law in laws]
        for metric, tally in zip(metrics, tallies, strict=True):
            if all(not np.isnan(part.values[metric]) for part in parts):
                tally.note(average_interval(parts, metric), float(np.mean([t[metric] for t in true])))
    return tallies


def repeated(
    law: Law, questions: int, samples: int, sets: int, metrics: tuple[str, ...], *, agree: float
) -> list[Tally]:
    """Coverage with several samples of each question, a share of which agree on confidence and verdict."""
    true, tallies, rng = truth(law), [Tally() for _ in metrics], np.random.default_rng(questions)
    index: npt.NDArray[np.intp] = np.repeat(np.arange(questions), samples)
    for each in range(sets):
        asked, own = law.draw(rng, questions), law.draw(rng, questions * samples)
        same = np.repeat(rng.random(questions) < agree, samples)
        data = GradedPredictions(
            np.where(same, asked.confidence[index], own.confidence),
            np.where(same, asked.correct[index], own.correct),
            own.tokens_to_confidence,
        )
        found = Estimates(data, questions=index, seed=each)
        for metric, tally in zip(metrics, tallies, strict=True):
            tally.note(found.interval(metric), true[metric])
    return tallies


def over_seeds(seeds: int, sets: int) -> dict[str, float]:
    """Coverage of Student's t for a mean over few seeds, as ``reproduce`` uses it, under laws of the differences."""
    rng, shape = np.random.default_rng(0), (sets, seeds)
    laws = {
        "normal": (rng.normal(0.1, 0.05, shape), 0.1),
        "uniform": (rng.random(shape), 0.5),
        "exponential": (rng.exponential(1, shape), 1.0),
        "one seed in five collapses": (rng.normal(0, 0.02, shape) + (rng.random(shape) < 0.2), 0.2),
    }
    held = {}
    for name, (values, true) in laws.items():
        found = [mean_interval(row.tolist()) for row in values]
        held[name] = float(np.mean([interval.low <= true <= interval.high for interval in found]))
    return held


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.interval_coverage", description=__doc__)
    parser.add_argument("--sets", type=int, default=500, help="simulated sets of each law and size (default: 500)")
    sets = parser.parse_args().sets
    print("95% intervals: percent of sets that hold the true value (mean width)\n")
    print(f"{'':44} " + " ".join(f"{metric:>15}" for metric in METRICS))

    def show(what: str, n: int, tallies: list[Tally]) -> None:
        print(f"{what:38} {n:5} " + " ".join(f"{tally!s:>15}" for tally in tallies), flush=True)

    for name, law in LAWS.items():
        for n in SIZES:
            show(name, n, alone(law, n, sets, METRICS))
    pairs = [
        ("calibrated, spread", "calibrated, peaked"),
        ("calibrated, spread", "constant .7, right"),
        ("p = s^2", "over-confident by .03"),
        ("above .9, calibrated", "above .9, over-confident"),
        ("sure, all right", "sure, all wrong"),
        ("sure, all right", "sure, all right"),
        ("uninformative", "calibrated, at both ends"),
    ]
    for one, other in pairs:
        for n in SIZES:
            show(f"{other} - {one}"[:38], n, paired(LAWS[one], LAWS[other], n, sets, METRICS))
    for names in (("calibrated, spread",) * 4, ("p = s^2", "above .9, calibrated"), ("sure, all right",) * 3):
        for n in SIZES:
            show(f"mean of {len(names)}: {names[0]}, ..."[:38], n, averaged([LAWS[x] for x in names], n, sets, METRICS))
    for agree in (0.0, 0.5, 1.0):
        for questions in (30, 200):
            what = f"8 samples, {agree:.0%} agree, p = s^2"
            show(what, questions, repeated(LAWS["p = s^2"], questions, 8, sets, METRICS, agree=agree))
    print("\nStudent's t over five seeds, percent that hold the true mean")
    for name, held in over_seeds(5, 20 * sets).items():
        print(f"{name:38} {100 * held:.1f}")


if __name__ == "__main__":
    main()
