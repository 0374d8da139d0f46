"""Routing replayed from stored predictions: cost and accuracy of each way of choosing a tier.

No model runs.  Every tier has answered every question once.  A router's answer is that of the tier at which it stops.
Its cost is that tier's whole response and the tokens of the tiers before: up to the confidence where that comes first,
the whole response where it comes after the answer.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.stats import beta

from coca_mindspeed.errors import DataError
from coca_mindspeed.evaluation.predictions import Prediction
from coca_mindspeed.serving.decision import Budget, ThresholdRule, decide

Floats = npt.NDArray[np.float64]

_INVALID_TOKENS = 32  # read at most before a response without a confidence is left
_MOST_THRESHOLDS = 200


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
        keys: (data set, question, sample) of each column.
    """

    names: tuple[str, ...]
    confidence: Floats
    correct: npt.NDArray[np.bool_]
    whole: Floats
    opening: Floats
    question: npt.NDArray[np.intp]
    keys: Sequence[tuple[str, str, int]]


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
    # A question counts where the answer of every tier could be graded.
    keys = [key for key in keys if all(found[key].correct is not None for found in by_key.values())]
    if not keys:
        raise DataError(f"none of the {len(tiers)} tiers' common questions has an answer of every tier that was graded")
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
        keys,
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


def replay_policy(tiers: Tiers, rules: Sequence[ThresholdRule | None], budget: Budget) -> PolicyOutcome:
    """Replay a policy by the function that the proxy decides by.

    Args:
        tiers: what they said.
        rules: one a tier; None: the tier states no confidence and answers.
        budget: of each request; its tokens are not counted here.
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
            left = left.spend(escalations=1)
    error = float("nan") if answers == 0 else 1 - right / answers
    return PolicyOutcome(right / n, answers / n, error, cost / n, {name: count / n for name, count in ended.items()})


def tier_name(path: Path) -> str:
    """What a tier of a predictions file is called."""
    return path.resolve().parent.name if path.stem == "predictions" else path.stem


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


@dataclass(frozen=True, slots=True)
class Setting:
    """A threshold for all tiers but the last, and the share of questions that it sends to the last.

    Attributes:
        threshold: answer from this confidence on.
        share: of the questions that reach the last tier.
        low, high: 95% interval of that share on other questions (Clopper-Pearson).
        quality: share of right answers.
        cost: mean cost of a question.
    """

    threshold: float
    share: float
    low: float
    high: float
    quality: float
    cost: float


def setting_of_share(tiers: Tiers, share: float) -> Setting:
    """The threshold whose share of questions that reach the last tier is nearest to ``share``."""
    curve, thresholds = threshold_curve(tiers), thresholds_of(tiers)
    shares = curve.last.mean(axis=1)[:-1]  # the last threshold is above 1
    if not len(shares):
        raise DataError("no tier but the last states a valid confidence, so that there is no threshold")
    best = int(np.argmin(np.abs(shares - share)))
    n = int(tiers.question.max()) + 1  # samples of one question count once
    reached = float(shares[best]) * n
    low = float(beta.ppf(0.025, reached, n - reached + 1)) if reached > 0 else 0.0
    high = float(beta.ppf(0.975, reached + 1, n - reached)) if reached < n else 1.0
    quality, cost = float(curve.correct[best].mean()), float(curve.cost[best].mean())
    return Setting(float(thresholds[best]), float(shares[best]), low, high, quality, cost)
