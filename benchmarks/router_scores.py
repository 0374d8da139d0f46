"""Scores of routers from stored predictions: AIQ, and the calls and the cost that close a part of the gap."""

import numpy as np

from coca_router.replay import CostCurve, Floats, Tiers

GAPS = (0.2, 0.5, 0.8)


def single_curve(tiers: Tiers) -> CostCurve:
    """Each tier alone; random routing is the straight line between two of them."""
    last = np.zeros(tiers.whole.shape)
    last[-1] = 1
    return CostCurve(tiers.correct.astype(np.float64), tiers.whole, last)


def oracle_curve(tiers: Tiers) -> CostCurve:
    """The cheapest tier that is right; where none is, the cheapest."""
    price = np.where(tiers.correct, tiers.whole, np.inf)
    any_right = np.asarray(tiers.correct.any(axis=0))
    chosen = np.where(any_right, price.argmin(axis=0), tiers.whole.argmin(axis=0))
    cost, last = tiers.whole[chosen, np.arange(len(chosen))], chosen == len(tiers.names) - 1
    return CostCurve(any_right[None].astype(np.float64), cost[None], last[None].astype(np.float64))


def upper_hull(x: Floats, y: Floats) -> tuple[Floats, Floats]:
    """Corners of the smallest concave, never falling curve above points, which mixing settings at random reaches."""
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


def router_scores(quality: Floats, cost: Floats, last: Floats, singles: tuple[Floats, Floats]) -> dict[str, float]:
    """Scores of a router with G settings, which may be mixed with always asking the first or the last tier.

    ``quality``, ``cost`` and ``last`` (share of questions sent to the last tier) are (G,); ``singles`` are quality (T,)
    and cost (T,) of each tier alone. Scores are NaN where undefined:

    - ``aiq``: mean quality over the costs from the cheapest tier's to the most expensive's (RouterBench's AIQ).
    - ``calls_at_GAP``: share of questions sent to the last tier to close a part of the gap in quality between the
      first tier and the last (RouteLLM's call-performance thresholds).
    - ``cost_at_GAP``: cost of closing it, as a share of the last tier's cost.
    """
    single_quality, single_cost = singles
    ends = [0, len(single_quality) - 1]
    x, y = upper_hull(np.append(cost, single_cost[ends]), np.append(quality, single_quality[ends]))
    low, high = float(single_cost[0]), float(single_cost[-1])
    aiq = float("nan")
    if high > low:
        grid = np.unique(np.concatenate([[low, high], x[(x > low) & (x < high)]]))
        heights = np.interp(grid, x, y)
        aiq = float(np.diff(grid) @ (heights[1:] + heights[:-1]) / 2 / (high - low))
    gap = float(single_quality[-1] - single_quality[0])
    names = [f"{kind}_at_{share:g}" for kind in ("calls", "cost") for share in GAPS]
    values: Floats = np.full(len(names), np.nan)
    if gap > 0:
        called, reached = upper_hull(np.append(last, [0.0, 1.0]), np.append(quality, single_quality[ends]))
        wanted = single_quality[0] + np.array(GAPS) * gap
        values = np.append(np.interp(wanted, reached, called), np.interp(wanted, y, x) / high)
    return {"aiq": aiq, **dict(zip(names, values.tolist(), strict=True))}


def score_router(tiers: Tiers, curve: CostCurve) -> dict[str, float]:
    """The scores of one router on the tiers' questions."""
    means = [values.mean(axis=1) for values in curve]
    return router_scores(*means, (tiers.correct.mean(axis=1), tiers.whole.mean(axis=1)))
