"""Routing replayed from stored predictions: what each way of choosing a tier costs, and how often it is right.

No model runs.  Every tier has answered every question once; a router's answer is that of the tier it stops at, and
its cost is that tier's whole response and what it generated on the way: up to the confidence where that comes first,
the whole response where it comes after the answer.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.integrate import trapezoid

from coca_mindspeed.errors import DataError
from coca_mindspeed.evaluation.intervals.bootstrap import shifted_percentiles
from coca_mindspeed.evaluation.intervals.bounds import Interval
from coca_mindspeed.evaluation.predictions import Prediction
from coca_mindspeed.serving.decision import Budget, Rule, decide

Floats = npt.NDArray[np.float64]

GAPS = (0.2, 0.5, 0.8)
_MOST_THRESHOLDS = 200
_INVALID_TOKENS = 32  # read at most before a response without a confidence is left
_BLOCK = 64  # replicates at once


@dataclass(frozen=True, slots=True)
class Tiers:
    """What T tiers said to n questions.

    Attributes:
        names: of the tiers, from the cheapest.
        confidence: float (T, n), NaN where invalid.
        correct: bool (T, n).
        whole: float (T, n), cost of the whole response.
        opening: float (T, n), cost until the confidence is known.
        question: int (n,), equal for samples of one question.
    """

    names: tuple[str, ...]
    confidence: Floats
    correct: npt.NDArray[np.bool_]
    whole: Floats
    opening: Floats
    question: npt.NDArray[np.intp]


def join_tiers(
    tiers: Mapping[str, Sequence[Prediction]],
    prices: Sequence[float],
    count_tokens: Callable[[str], int] | None = None,
) -> Tiers:
    """Pair the tiers' predictions by data set, question and sample.

    Args:
        tiers: name -> predictions, from the cheapest tier to the dearest.
        prices: of a generated token, one a tier.
        count_tokens: of a response whose prediction does not say.

    Raises:
        DataError: fewer than two tiers, questions that not every tier has answered, or tokens that nobody counted.
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
    rows = {name: [found[key] for key in keys] for name, found in by_key.items()}
    tokens = {name: [_tokens(p, name, count_tokens) for p in row] for name, row in rows.items()}
    opening = [[_opening(p, t, name) for p, t in zip(rows[name], tokens[name], strict=True)] for name in tiers]
    price = np.array(prices, dtype=np.float64)[:, None]
    questions = [f"{dataset}\0{id_}" for dataset, id_, _ in keys]
    return Tiers(
        tuple(tiers),
        np.array(
            [[np.nan if p.confidence is None else p.confidence for p in row] for row in rows.values()], dtype=np.float64
        ),
        np.array([[p.correct for p in row] for row in rows.values()]),
        np.array(list(tokens.values())) * price,
        np.array(opening) * price,
        np.unique(np.array(questions), return_inverse=True)[1],
    )


def _tokens(p: Prediction, tier: str, count: Callable[[str], int] | None) -> int:
    if p.tokens is not None:
        return p.tokens
    if count is None:
        raise DataError(f"{tier}: {p.dataset} {p.id} has no 'tokens'; count them by the model's --tokenizer")
    return count(p.response)


def _opening(p: Prediction, tokens: int, tier: str) -> int:
    if p.confidence is None:
        return min(tokens, _INVALID_TOKENS)
    if p.tokens_to_confidence is None:
        raise DataError(f"{tier}: {p.dataset} {p.id} has a confidence, but no 'tokens_to_confidence'")
    return p.tokens_to_confidence


class Curve(NamedTuple):
    """A router's settings from cheap to dear, per question: correct (G, n), cost (G, n), asked the last tier (G, n)."""

    correct: Floats
    cost: Floats
    last: Floats


def thresholds_of(tiers: Tiers) -> Floats:
    """Thresholds (G,) worth trying: the stated confidences of all tiers but the last, and one above them all."""
    stated = np.unique(tiers.confidence[:-1][~np.isnan(tiers.confidence[:-1])])
    if len(stated) > _MOST_THRESHOLDS:
        stated = np.unique(np.quantile(stated, np.linspace(0, 1, _MOST_THRESHOLDS), method="nearest"))
    return np.append(stated, 2.0)


def threshold_curve(tiers: Tiers, *, answer_first: bool = False) -> Curve:
    """Stop at the first tier whose confidence reaches the threshold, the same for all tiers; the last one answers.

    Args:
        tiers: what they said.
        answer_first: pay for the whole response of every tier on the way.
    """
    thresholds = thresholds_of(tiers)
    shape = len(thresholds), tiers.correct.shape[1]
    correct, cost = np.zeros(shape), np.zeros(shape)
    going: npt.NDArray[np.bool_] = np.ones(shape, dtype=np.bool_)
    passing = tiers.whole if answer_first else tiers.opening
    for tier in range(len(tiers.names)):
        final = tier == len(tiers.names) - 1
        with np.errstate(invalid="ignore"):
            sure: npt.NDArray[np.bool_] = np.asarray(tiers.confidence[tier][None] >= thresholds[:, None])
        stops = going if final else going & sure
        correct[stops] = np.broadcast_to(tiers.correct[tier], shape)[stops]
        cost += np.where(stops, tiers.whole[tier], 0.0) + np.where(going & ~stops, passing[tier], 0.0)
        if final:
            return Curve(correct, cost, going.astype(np.float64))
        going = going & ~stops
    raise AssertionError("the last tier answers")


def single_curve(tiers: Tiers) -> Curve:
    """Each tier on its own; random routing is the straight line between two of them."""
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


@dataclass(frozen=True, slots=True)
class PolicyOutcome:
    """What a policy would have done.

    Attributes:
        quality: share of right answers among all questions; a refusal is not one.
        answered: share of questions that got an answer.
        error: share of wrong ones among the answers, NaN where there are none.
        cost: mean cost of a question.
        stopped_at: tier -> share of questions that ended there.
    """

    quality: float
    answered: float
    error: float
    cost: float
    stopped_at: Mapping[str, float]


def replay_policy(tiers: Tiers, rules: Sequence[Rule | None], budget: Budget) -> PolicyOutcome:
    """Replay a policy by the function that the proxy decides by.

    Args:
        tiers: what they said.
        rules: one a tier; None: the tier states no confidence and answers.
        budget: of each request; its tokens are not counted here.

    Raises:
        DataError: the policy samples or calls the hook, which one stored response a question cannot show.
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
            if action in ("sample", "hook"):
                raise DataError(f"tier {name}: the action {action!r} cannot be replayed from one response a question")
            cost += float(tiers.whole[row, column] if action == "answer" else tiers.opening[row, column])
            if action != "escalate":
                ended[name] += 1
                answers += action == "answer"
                right += action == "answer" and bool(tiers.correct[row, column])
                break
            left = left.spend(escalations=1)
    error = float("nan") if answers == 0 else 1 - right / answers
    return PolicyOutcome(right / n, answers / n, error, cost / n, {name: count / n for name, count in ended.items()})


def tier_name(path: Path) -> str:
    """What a tier of a predictions file is called."""
    return path.resolve().parent.name if path.stem == "predictions" else path.stem
