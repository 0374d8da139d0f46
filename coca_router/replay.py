"""Routing replayed from stored predictions, in which every tier has answered every question once.

A router's answer is that of the tier at which it stops. Its cost is that tier's whole response and the tokens of the
tiers before: up to the confidence where that comes first, the whole response where it comes after the answer.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from coca_mindspeed.errors import DataError
from coca_mindspeed.evaluation.metrics import clopper_pearson
from coca_mindspeed.evaluation.predictions import Prediction

Floats = npt.NDArray[np.float64]

_INVALID_TOKENS = 32  # read at most before a response without a confidence is left
_MOST_THRESHOLDS = 200


@dataclass(frozen=True, slots=True)
class Tiers:
    """Responses of T tiers, from the cheapest, to n questions."""

    names: tuple[str, ...]
    confidence: Floats  # [T, n], NaN where invalid
    correct: npt.NDArray[np.bool_]  # [T, n]
    whole: Floats  # [T, n], cost of the whole response
    opening: Floats  # [T, n], cost until the confidence is known
    question: npt.NDArray[np.intp]  # [n], equal for samples of one question


def join_tiers(
    tiers: Mapping[str, Sequence[Prediction]], prices: Sequence[float], count_tokens: Callable[[str], int] | None = None
) -> Tiers:
    """Pair the tiers' predictions by data set, question and sample; ungraded answers are left out.

    ``tiers`` go from the cheapest to the most expensive, ``prices`` are of a generated token, and ``count_tokens``
    counts those of a response where a prediction lacks ``tokens``. DataError for fewer than two tiers, different
    questions, or unknown tokens.
    """
    if len(tiers) < 2 or len(prices) != len(tiers):
        raise DataError(f"routing needs two tiers or more with a price each, found {len(tiers)} and {len(prices)}")
    by_key = {name: {p.key: p for p in predictions} for name, predictions in tiers.items()}
    keys = list(next(iter(by_key.values())))
    for name, own in by_key.items():
        if len(own) < len(tiers[name]):
            raise DataError(f"{name}: answers a question twice; give the predictions of one method and model")
        if missing := set(keys) ^ set(own):
            raise DataError(f"{name}: every tier should answer the same questions; {min(missing)} is not in all")
    keys = [key for key in keys if all(own[key].correct is not None for own in by_key.values())]
    if not keys:
        raise DataError(f"none of the {len(tiers)} tiers' common questions has an answer of every tier that was graded")
    rows = {name: [own[key] for key in keys] for name, own in by_key.items()}
    costs = np.array([[_tokens(p, name, count_tokens) for p in row] for name, row in rows.items()], dtype=np.float64)
    whole, opening = np.moveaxis(costs * np.array(prices)[:, None, None], 2, 0)
    return Tiers(
        tuple(tiers),
        np.array([[np.nan if p.confidence is None else p.confidence for p in row] for row in rows.values()]),
        np.array([[p.correct for p in row] for row in rows.values()]),
        whole,
        opening,
        np.unique([f"{dataset}\0{id_}" for dataset, id_, _ in keys], return_inverse=True)[1],
    )


def _tokens(p: Prediction, tier: str, count: Callable[[str], int] | None) -> tuple[int, int]:
    """Tokens of the whole response, and until its confidence is known."""
    if p.tokens is None and count is None:
        raise DataError(f"{tier}: {p.dataset} {p.id} has no 'tokens'; count them by the model's --tokenizer")
    whole = p.tokens if p.tokens is not None or count is None else count(p.response)
    assert whole is not None
    if p.confidence is None:
        return whole, min(whole, _INVALID_TOKENS)
    if p.tokens_to_confidence is None:
        raise DataError(f"{tier}: {p.dataset} {p.id} has a confidence, but no 'tokens_to_confidence'")
    return whole, p.tokens_to_confidence


def by_answer(p: Prediction, count: Callable[[str], int] | None = None) -> Prediction:
    """The prediction with its ``answer_probability`` as confidence, which is known at the end of the answer."""
    length = count(p.response) if count and p.tokens is None else p.tokens
    return replace(p, confidence=p.answer_probability, tokens_to_confidence=length)


class CostCurve(NamedTuple):
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


def threshold_curve(tiers: Tiers, *, answer_first: bool = False) -> CostCurve:
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
    return CostCurve(correct + going * tiers.correct[last], cost + going * tiers.whole[last], going.astype(np.float64))


@dataclass(frozen=True, slots=True)
class Setting:
    """A threshold for all tiers but the last."""

    threshold: float
    share: float  # of the questions that reach the last tier
    low: float  # 95% interval of the share on other questions (Clopper-Pearson)
    high: float
    quality: float  # share of right answers
    cost: float  # mean, of a question
    answer_first_cost: float  # if the same decisions were made after the answer


def setting_of_share(tiers: Tiers, share: float) -> Setting:
    """The threshold whose share of questions that reach the last tier is nearest to ``share``."""
    curve, thresholds = threshold_curve(tiers), thresholds_of(tiers)
    shares = curve.last.mean(axis=1)[:-1]  # the last threshold is above 1
    if not len(shares):
        raise DataError("no tier but the last states a valid confidence, so that there is no threshold")
    best = int(np.argmin(np.abs(shares - share)))
    n = int(tiers.question.max()) + 1  # samples of one question count once
    low, high = map(float, clopper_pearson(float(shares[best]) * n, n))
    means = (curve.correct, curve.cost, threshold_curve(tiers, answer_first=True).cost)
    return Setting(float(thresholds[best]), float(shares[best]), low, high, *(float(m[best].mean()) for m in means))


class Reference(NamedTuple):
    """A way of answering that a router is compared with."""

    name: str
    quality: float  # share of right answers
    cost: float  # mean, of a question


def best_single(tiers: Tiers) -> Reference:
    """The tier with most right answers; of equal ones the cheapest."""
    singles = _singles(tiers)
    return max(singles, key=lambda single: (single.quality, -single.cost))


def oracle(tiers: Tiers) -> Reference:
    """The cheapest right answer to each question, and the cheapest answer where none is right."""
    cost = np.where(tiers.correct, tiers.whole, np.inf).min(axis=0)
    cost = np.where(np.isinf(cost), tiers.whole.min(axis=0), cost)
    return Reference("oracle", float(tiers.correct.any(axis=0).mean()), float(cost.mean()))


def random_mix(tiers: Tiers, cost: float) -> float:
    """Most right answers on average of a mix of tiers by chance, with a mean cost of at most ``cost``; NaN: too small.

    The router pays for confidences that it does not keep; a mix by chance reads none.
    """
    singles = _singles(tiers)
    best = math.nan
    for cheap, dear in itertools.combinations_with_replacement(sorted(singles, key=lambda s: s.cost), 2):
        if cheap.cost <= cost:
            share = 1.0 if dear.cost <= cost else (cost - cheap.cost) / (dear.cost - cheap.cost)
            best = np.nanmax([best, cheap.quality, cheap.quality + share * (dear.quality - cheap.quality)])
    return float(best)


def _singles(tiers: Tiers) -> list[Reference]:
    columns = zip(tiers.names, tiers.correct, tiers.whole, strict=True)
    return [Reference(name, float(correct.mean()), float(whole.mean())) for name, correct, whole in columns]
