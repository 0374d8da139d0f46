"""One number for a way of routing: its mean quality over costs, and what closing a gap takes, with intervals."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.integrate import trapezoid

from coca_mindspeed.evaluation.intervals.bounds import Interval, shifted_percentiles
from coca_mindspeed.serving.replay import Curve, Floats, Tiers, single_curve

GAPS = (0.2, 0.5, 0.8)
_BLOCK = 64  # replicates at once


def upper_hull(x: Floats, y: Floats) -> tuple[Floats, Floats]:
    """Corners of the smallest concave, never falling curve above points; what mixing settings at random reaches."""
    order = np.lexsort((-y, x))
    corners: list[tuple[float, float]] = []
    for point in zip(x[order].tolist(), y[order].tolist(), strict=True):
        if corners and point[1] <= corners[-1][1]:
            continue
        while len(corners) >= 2:
            (x0, y0), (x1, y1) = corners[-2:]
            if (y1 - y0) * (point[0] - x1) > (point[1] - y1) * (x1 - x0):
                break
            corners.pop()
        corners.append(point)
    hull = np.array(corners)
    return hull[:, 0], hull[:, 1]


class RouterScores(NamedTuple):
    """One router on one weighting of the questions.

    Attributes:
        aiq: mean quality over the costs from the cheapest tier's to the dearest's (RouterBench's AIQ).
        calls: share of questions for which the last tier is asked, to close each of :data:`GAPS` of the gap in
            quality between the first tier and the last (RouteLLM's call-performance thresholds).
        cost: that this takes, as a share of the last tier's.
    """

    aiq: float
    calls: tuple[float, ...]
    cost: tuple[float, ...]


def router_scores(quality: Floats, cost: Floats, last: Floats, singles: tuple[Floats, Floats]) -> RouterScores:
    """Scores of a router that may also be mixed with always asking one tier.

    Args:
        quality: (G,) of its settings.
        cost: (G,).
        last: (G,), share of questions that ask the last tier.
        singles: quality (T,) and cost (T,) of each tier on its own.
    """
    single_quality, single_cost = singles
    ends = [0, len(single_quality) - 1]
    x, y = upper_hull(np.append(cost, single_cost[ends]), np.append(quality, single_quality[ends]))
    low, high = float(single_cost[0]), float(single_cost[-1])
    aiq = float("nan")
    if high > low:
        grid = np.unique(np.concatenate([[low, high], x[(x > low) & (x < high)]]))
        aiq = float(trapezoid(np.interp(grid, x, y), grid) / (high - low))
    gap = float(single_quality[-1] - single_quality[0])
    undefined = (float("nan"),) * len(GAPS)
    if gap <= 0:
        return RouterScores(aiq, undefined, undefined)
    called, reached = upper_hull(np.append(last, [0.0, 1.0]), np.append(quality, single_quality[ends]))
    wanted = [float(single_quality[0]) + share * gap for share in GAPS]
    # Both hulls rise, so the least that reaches a quality is the inverse of the curve there.
    return RouterScores(
        aiq,
        tuple(float(np.interp(q, reached, called)) for q in wanted),
        tuple(float(np.interp(q, y, x)) / high for q in wanted),
    )


@dataclass(frozen=True, slots=True)
class Routed:
    """A router's curve and scores.

    Attributes:
        name: of the router.
        quality: (G,) share of right answers of each setting.
        cost: (G,) mean cost of a question.
        intervals: ``aiq``, ``calls_at_0.5``, ``cost_at_0.5``, ...
    """

    name: str
    quality: Floats
    cost: Floats
    intervals: Mapping[str, Interval]


def compare_routers(tiers: Tiers, curves: Mapping[str, Curve], *, replicates: int = 500, seed: int = 0) -> list[Routed]:
    """Scores of each router with intervals; questions are resampled with all their samples.

    Args:
        tiers: what they said.
        curves: router -> its settings.
        replicates: of the bootstrap.
        seed: of the bootstrap; the routers get the same draws.
    """
    n = tiers.correct.shape[1]
    weights = _draws(tiers.question, replicates, seed)
    singles = single_curve(tiers)
    results = []
    for name, curve in curves.items():
        point = _scores(curve, singles, np.ones((1, n)))[0]
        drawn = [
            scores
            for start in range(0, replicates, _BLOCK)
            for scores in _scores(curve, singles, weights[start : start + _BLOCK])
        ]
        intervals = {"aiq": _interval(point.aiq, [s.aiq for s in drawn])}
        for index, gap in enumerate(GAPS):
            intervals[f"calls_at_{gap:g}"] = _interval(point.calls[index], [s.calls[index] for s in drawn])
            intervals[f"cost_at_{gap:g}"] = _interval(point.cost[index], [s.cost[index] for s in drawn])
        results.append(Routed(name, curve.correct.mean(axis=1), curve.cost.mean(axis=1), intervals))
    return results


def _draws(question: npt.NDArray[np.intp], replicates: int, seed: int) -> Floats:
    """Weights (r, n): each replicate a draw of as many questions as there are, with replacement."""
    count = int(question.max()) + 1
    rng = np.random.default_rng(seed)
    drawn = rng.integers(0, count, size=(replicates, count)) + np.arange(replicates)[:, None] * count
    weights = np.bincount(drawn.ravel(), minlength=replicates * count).reshape(replicates, count)
    return weights[:, question].astype(np.float64)


def _scores(curve: Curve, singles: Curve, weights: Floats) -> list[RouterScores]:
    def means(values: Floats) -> Floats:
        return np.asarray(weights @ values.T / weights.sum(axis=1, keepdims=True))

    parts = [means(values) for values in (*curve, singles.correct, singles.cost)]
    return [router_scores(q, c, last, (sq, sc)) for q, c, last, sq, sc in zip(*parts, strict=True)]


def _interval(estimate: float, values: Sequence[float]) -> Interval:
    return shifted_percentiles(estimate, np.array(values), lower=0.0)
