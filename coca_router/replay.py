"""Routing replayed from stored predictions, in which every tier has answered every question once.

A router's answer is that of the tier at which it stops. Its cost is that tier's whole response and the tokens of the
tiers before: up to the confidence where that comes first, the whole response where it comes after the answer.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from coca_mindspeed.errors import DataError
from coca_mindspeed.evaluation.intervals.bounds import Interval, shifted_percentiles
from coca_mindspeed.evaluation.metrics.binning import clopper_pearson
from coca_mindspeed.evaluation.predictions import Prediction
from coca_router.decision import Budget, ThresholdRule, decide

Floats = npt.NDArray[np.float64]

_INVALID_TOKENS = 32  # read at most before a response without a confidence is left
_MOST_THRESHOLDS = 200
GAPS = (0.2, 0.5, 0.8)
_BLOCK = 64  # replicates at once


@dataclass(frozen=True, slots=True)
class Tiers:
    """Responses of T tiers, from the cheapest, to n questions."""

    names: tuple[str, ...]
    confidence: Floats  # (T, n), NaN where invalid
    correct: npt.NDArray[np.bool_]  # (T, n)
    whole: Floats  # (T, n), cost of the whole response
    opening: Floats  # (T, n), cost until the confidence is known
    question: npt.NDArray[np.intp]  # (n,), equal for samples of one question
    keys: Sequence[tuple[str, str, int]]  # data set, question, sample


def join_tiers(
    tiers: Mapping[str, Sequence[Prediction]], prices: Sequence[float], count_tokens: Callable[[str], int] | None = None
) -> Tiers:
    """Pair the tiers' predictions by data set, question and sample; ungraded answers are left out.

    Args:
        tiers: name -> predictions, from the cheapest tier to the most expensive.
        prices: of a generated token, one a tier.
        count_tokens: of a response, for predictions without ``tokens``.

    Raises:
        DataError: fewer than two tiers, different questions, or tokens are unknown.
    """
    if len(tiers) < 2 or len(prices) != len(tiers):
        raise DataError(f"routing needs two tiers or more with a price each, found {len(tiers)} and {len(prices)}")
    by_key = {name: {p.key: p for p in predictions} for name, predictions in tiers.items()}
    keys = list(next(iter(by_key.values())))
    for name, found in by_key.items():
        if len(found) < len(tiers[name]):
            raise DataError(f"{name}: answers a question twice; give the predictions of one method and model")
        if missing := set(keys) ^ set(found):
            raise DataError(
                f"{name}: every tier should answer the same questions; {min(missing)} is not in all of them"
            )
    keys = [key for key in keys if all(found[key].correct is not None for found in by_key.values())]
    if not keys:
        raise DataError(f"none of the {len(tiers)} tiers' common questions has an answer of every tier that was graded")
    rows = {name: [found[key] for key in keys] for name, found in by_key.items()}
    tokens = [[_tokens(p, name, count_tokens) for p in row] for name, row in rows.items()]
    opening = [[_opening(p, name, count_tokens) for p in row] for name, row in rows.items()]
    confidence = [[np.nan if p.confidence is None else p.confidence for p in row] for row in rows.values()]
    price = np.array(prices, dtype=np.float64)[:, None]
    questions = np.array([f"{dataset}\0{id_}" for dataset, id_, _ in keys])
    return Tiers(
        tuple(tiers),
        np.array(confidence, dtype=np.float64),
        np.array([[p.correct for p in row] for row in rows.values()]),
        np.array(tokens) * price,
        np.array(opening) * price,
        np.unique(questions, return_inverse=True)[1],
        keys,
    )


def _tokens(p: Prediction, tier: str, count: Callable[[str], int] | None) -> int:
    if p.tokens is not None:
        return p.tokens
    if count is None:
        raise DataError(f"{tier}: {p.dataset} {p.id} has no 'tokens'; count them by the model's --tokenizer")
    return count(p.response)


def _opening(p: Prediction, tier: str, count: Callable[[str], int] | None) -> int:
    if p.confidence is None:
        return min(_tokens(p, tier, count), _INVALID_TOKENS)
    if p.tokens_to_confidence is None:
        raise DataError(f"{tier}: {p.dataset} {p.id} has a confidence, but no 'tokens_to_confidence'")
    return p.tokens_to_confidence


@dataclass(frozen=True, slots=True)
class PolicyOutcome:
    quality: float  # share of right answers among all questions; a refusal is none
    answered: float  # share of questions with an answer
    error: float  # share of wrong ones among the answers, NaN without answers
    cost: float  # mean, of a question
    stopped_at: Mapping[str, float]  # tier -> share of questions


def replay_policy(tiers: Tiers, rules: Sequence[ThresholdRule | None], budget: Budget) -> PolicyOutcome:
    """Replay a policy with the proxy's own :func:`decide`; ``budget.tokens`` is not counted.

    ``rules`` has one rule a tier, None where the tier states no confidence and answers.
    """
    n = tiers.correct.shape[1]
    right = answers = 0
    cost = 0.0
    ended = dict.fromkeys(tiers.names, 0)
    for column in range(n):
        left = budget
        for row, (name, rule) in enumerate(zip(tiers.names, rules, strict=True)):
            stated = float(tiers.confidence[row, column])
            left = replace(left, escalations=min(left.escalations, len(tiers.names) - 1 - row))
            action = "answer" if rule is None else decide(None if np.isnan(stated) else stated, rule, left).action
            cost += float(tiers.whole[row, column] if action == "answer" else tiers.opening[row, column])
            if action != "escalate":
                ended[name] += 1
                answers += action == "answer"
                right += action == "answer" and bool(tiers.correct[row, column])
                break
            left = left.spend_escalation()
    error = float("nan") if answers == 0 else 1 - right / answers
    return PolicyOutcome(right / n, answers / n, error, cost / n, {name: count / n for name, count in ended.items()})


def tier_name(path: Path) -> str:
    return path.resolve().parent.name if path.stem == "predictions" else path.stem


class Curve(NamedTuple):
    """A router with G settings, from cheap to expensive."""

    correct: Floats  # (G, n)
    cost: Floats  # (G, n)
    last: Floats  # (G, n), 1 where the last tier was asked


def thresholds_of(tiers: Tiers) -> Floats:
    """Thresholds (G,): the stated confidences of all tiers but the last, and one above them all."""
    stated = np.unique(tiers.confidence[:-1][~np.isnan(tiers.confidence[:-1])])
    if len(stated) > _MOST_THRESHOLDS:
        stated = np.unique(np.quantile(stated, np.linspace(0, 1, _MOST_THRESHOLDS), method="nearest"))
    return np.append(stated, 2.0)


def threshold_curve(tiers: Tiers, *, answer_first: bool = False) -> Curve:
    """Stop at the first tier whose confidence reaches the threshold, the same for all tiers; the last one answers.

    ``answer_first`` pays for the whole response of every tier before the last one asked.
    """
    thresholds = thresholds_of(tiers)[:, None]
    passing = tiers.whole if answer_first else tiers.opening
    correct, cost = np.zeros((len(thresholds), 1)), np.zeros((len(thresholds), 1))
    going: npt.NDArray[np.bool_] = np.ones(correct.shape, dtype=np.bool_)
    last = len(tiers.names) - 1
    for tier in range(last):
        with np.errstate(invalid="ignore"):
            stops = going & (tiers.confidence[tier] >= thresholds)
        going = going & ~stops
        correct = correct + stops * tiers.correct[tier]
        cost = cost + stops * tiers.whole[tier] + going * passing[tier]
    return Curve(correct + going * tiers.correct[last], cost + going * tiers.whole[last], going.astype(np.float64))


def single_curve(tiers: Tiers) -> Curve:
    """Each tier alone; random routing is the straight line between two of them."""
    last = np.zeros(tiers.whole.shape)
    last[-1] = 1
    return Curve(tiers.correct.astype(np.float64), tiers.whole, last)


def oracle_curve(tiers: Tiers) -> Curve:
    """The cheapest tier that is right; where none is, the cheapest."""
    price = np.where(tiers.correct, tiers.whole, np.inf)
    any_right = np.asarray(tiers.correct.any(axis=0))
    chosen = np.where(any_right, price.argmin(axis=0), tiers.whole.argmin(axis=0))
    column = np.arange(len(chosen))
    return Curve(
        any_right[None].astype(np.float64),
        tiers.whole[chosen, column][None],
        (chosen == len(tiers.names) - 1)[None].astype(np.float64),
    )


@dataclass(frozen=True, slots=True)
class Setting:
    """A threshold for all tiers but the last."""

    threshold: float
    share: float  # of the questions that reach the last tier
    low: float  # 95% interval of the share on other questions (Clopper-Pearson)
    high: float
    quality: float  # share of right answers
    cost: float  # mean, of a question


def setting_of_share(tiers: Tiers, share: float) -> Setting:
    """The threshold whose share of questions that reach the last tier is nearest to ``share``."""
    curve, thresholds = threshold_curve(tiers), thresholds_of(tiers)
    shares = curve.last.mean(axis=1)[:-1]  # the last threshold is above 1
    if not len(shares):
        raise DataError("no tier but the last states a valid confidence, so that there is no threshold")
    best = int(np.argmin(np.abs(shares - share)))
    n = int(tiers.question.max()) + 1  # samples of one question count once
    low, high = map(float, clopper_pearson(float(shares[best]) * n, n))
    quality, cost = float(curve.correct[best].mean()), float(curve.cost[best].mean())
    return Setting(float(thresholds[best]), float(shares[best]), low, high, quality, cost)


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

    Args:
        quality, cost, last: (G,) each; ``last`` is the share of questions sent to the last tier.
        singles: quality (T,) and cost (T,) of each tier alone.

    Returns:
        ``aiq``: mean quality over the costs from the cheapest tier's to the most expensive's (RouterBench's AIQ).
        ``calls_at_GAP``: share of questions sent to the last tier to close a part of the gap in quality between the
        first tier and the last (RouteLLM's call-performance thresholds). ``cost_at_GAP``: of closing it, as a share of
        the last tier's cost. NaN where undefined.
    """
    from scipy.integrate import trapezoid  # takes half a second to import, which a refusal must not

    single_quality, single_cost = singles
    ends = [0, len(single_quality) - 1]
    x, y = upper_hull(np.append(cost, single_cost[ends]), np.append(quality, single_quality[ends]))
    low, high = float(single_cost[0]), float(single_cost[-1])
    aiq = float("nan")
    if high > low:
        grid = np.unique(np.concatenate([[low, high], x[(x > low) & (x < high)]]))
        aiq = float(trapezoid(np.interp(grid, x, y), grid) / (high - low))
    gap = float(single_quality[-1] - single_quality[0])
    names = [f"{kind}_at_{share:g}" for kind in ("calls", "cost") for share in GAPS]
    values: Floats = np.full(len(names), np.nan)
    if gap > 0:
        called, reached = upper_hull(np.append(last, [0.0, 1.0]), np.append(quality, single_quality[ends]))
        wanted = single_quality[0] + np.array(GAPS) * gap
        values = np.append(np.interp(wanted, reached, called), np.interp(wanted, y, x) / high)
    return {"aiq": aiq, **dict(zip(names, values.tolist(), strict=True))}


@dataclass(frozen=True, slots=True)
class Routed:
    """A router's curve, and the intervals of its scores (``aiq``, ``calls_at_0.5``, ``cost_at_0.5``, ...)."""

    name: str
    quality: Floats  # (G,) share of right answers
    cost: Floats  # (G,) mean, of a question
    intervals: Mapping[str, Interval]


def compare_routers(tiers: Tiers, curves: Mapping[str, Curve], *, replicates: int = 500, seed: int = 0) -> list[Routed]:
    """Scores of each router with bootstrap intervals; questions are resampled with all their samples."""
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
        intervals = {
            score: shifted_percentiles(value, np.array([scores[score] for scores in drawn]), lower=0.0)
            for score, value in point.items()
        }
        results.append(Routed(name, curve.correct.mean(axis=1), curve.cost.mean(axis=1), intervals))
    return results


def _draws(question: npt.NDArray[np.intp], replicates: int, seed: int) -> Floats:
    """Weights (r, n): each replicate a draw of as many questions as there are, with replacement."""
    count = int(question.max()) + 1
    rng = np.random.default_rng(seed)
    drawn = rng.integers(0, count, size=(replicates, count)) + np.arange(replicates)[:, None] * count
    weights = np.bincount(drawn.ravel(), minlength=replicates * count).reshape(replicates, count)
    return weights[:, question].astype(np.float64)


def _scores(curve: Curve, singles: Curve, weights: Floats) -> list[dict[str, float]]:
    def means(values: Floats) -> Floats:
        return np.asarray(weights @ values.T / weights.sum(axis=1, keepdims=True))

    parts = [means(values) for values in (*curve, singles.correct, singles.cost)]
    return [router_scores(q, c, last, (sq, sc)) for q, c, last, sq, sc in zip(*parts, strict=True)]
