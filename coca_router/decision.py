"""The decision on a stated confidence: one pure function for the proxy, replay and Python callers."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Action = Literal["answer", "refuse", "escalate"]


@dataclass(frozen=True, slots=True)
class Band:
    """An action from the confidence ``at_least`` up to the band above."""

    at_least: float
    action: Action


@dataclass(frozen=True, slots=True)
class ThresholdRule:
    """Bands with thresholds that fall to exactly 0, and the action without a valid confidence.

    ``strict`` (a certified tier) refuses instead of ``Budget.exhausted`` where the budget forbids the action.
    """

    bands: Sequence[Band]
    invalid: Action = "escalate"
    strict: bool = False

    def __post_init__(self) -> None:
        thresholds = [band.at_least for band in self.bands]
        falling = all(a > b for a, b in itertools.pairwise(thresholds))
        if not thresholds or not falling or thresholds[-1] != 0 or thresholds[0] > 1:
            raise ValueError(f"bands should fall from at most 1 to exactly 0, found {thresholds}")


def answer_from(threshold: float, otherwise: Action = "escalate", *, strict: bool = False) -> ThresholdRule:
    """Answer from ``threshold`` on; ``otherwise`` applies below it and without a valid confidence."""
    bands = [Band(threshold, "answer"), Band(0.0, otherwise)] if threshold > 0 else [Band(0.0, "answer")]
    return ThresholdRule(bands, otherwise, strict)


@dataclass(frozen=True, slots=True)
class Budget:
    """The rest of a request's caps: further tiers, and tokens over all tiers (None: no cap)."""

    escalations: int
    tokens: int | None = None
    exhausted: Literal["answer", "refuse"] = "answer"


@dataclass(frozen=True, slots=True)
class Decision:
    """An action and its reason, which holds no text of the request.

    ``exhausted``: the budget allowed no escalation.
    """

    action: Action
    reason: str
    exhausted: bool = False


def decide(confidence: float | None, rule: ThresholdRule, budget: Budget) -> Decision:
    """Decide on a response by its confidence in [0, 1], None if it is invalid; ValueError for any other number."""
    if confidence is not None and not 0 <= confidence <= 1:
        raise ValueError(f"a confidence should be None or lie in [0, 1], found {confidence}")
    if budget.tokens == 0:
        return Decision("refuse", "the request's tokens are spent")
    if confidence is None:
        wanted = Decision(rule.invalid, "no valid confidence")
    else:
        index, band = next((i, band) for i, band in enumerate(rule.bands) if confidence >= band.at_least)
        lowest = index > 0 and index == len(rule.bands) - 1
        bound = f"below {rule.bands[index - 1].at_least:g}" if lowest else f"at least {band.at_least:g}"
        wanted = Decision(band.action, f"confidence {confidence:.4g} is {bound}")
    if wanted.action == "escalate" and budget.escalations < 1:
        action = "refuse" if rule.strict else budget.exhausted
        return Decision(action, f"{wanted.reason}, but no further tier is allowed", exhausted=True)
    return wanted
