"""What to do with a stated confidence: one pure function, for the proxy, for Python callers and for replay alike."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

Action = Literal["answer", "refuse", "escalate", "sample", "hook"]


@dataclass(frozen=True, slots=True)
class Band:
    """Confidences from ``at_least`` up to the band above.

    Attributes:
        at_least: lowest confidence of the band.
        action: what to do there.
        samples: how many to vote over, for ``sample``.
    """

    at_least: float
    action: Action
    samples: int = 0


@dataclass(frozen=True, slots=True)
class ThresholdRule:
    """Bands from the most confident down to 0, and the case of no valid confidence.

    Attributes:
        bands: thresholds strictly falling, the last one 0.
        invalid: what to do without a valid confidence, which is none of the bands.
    """

    bands: Sequence[Band]
    invalid: Action = "escalate"

    def __post_init__(self) -> None:
        thresholds = [band.at_least for band in self.bands]
        falling = all(a > b for a, b in itertools.pairwise(thresholds))
        if not thresholds or not falling or thresholds[-1] != 0 or thresholds[0] > 1:
            raise ValueError(f"bands should fall from at most 1 to exactly 0, found {thresholds}")
        for band in self.bands:
            if (band.action == "sample") != (band.samples > 1):
                raise ValueError(f"band at {band.at_least}: 'samples' of 2 or more belong to 'sample' and to no other")
        if self.invalid == "sample":
            raise ValueError("invalid: samples of a response without a valid confidence are no vote of confidence")


@dataclass(frozen=True, slots=True)
class CostRule:
    """What each action is expected to cost, all in one unit; the cheapest is taken.

    Attributes:
        answer: the tokens of this tier's answer.
        error: a wrong answer.
        refusal: no answer.
        escalate: asking the next tier, its expected errors included.
        invalid: what to do without a valid confidence, of which no cost can be expected.
    """

    answer: float
    error: float
    refusal: float
    escalate: float
    invalid: Action = "escalate"

    def __post_init__(self) -> None:
        if min(self.answer, self.error, self.refusal, self.escalate) < 0:
            raise ValueError(f"costs should be 0 or more, found {self}")
        if self.invalid == "sample":
            raise ValueError("invalid: samples of a response without a valid confidence are no vote of confidence")


Rule = ThresholdRule | CostRule


@dataclass(frozen=True, slots=True)
class Budget:
    """What a request may still spend.

    Attributes:
        escalations: further tiers.
        samples: further requests side by side.
        hooks: further calls of the hook.
        tokens: to generate, over all tiers; None: no cap.
        exhausted: what to do in place of an action that the budget does not allow.
    """

    escalations: int
    samples: int = 0
    hooks: int = 0
    tokens: int | None = None
    exhausted: Literal["answer", "refuse"] = "answer"

    def spend(self, *, tokens: int = 0, escalations: int = 0, samples: int = 0, hooks: int = 0) -> "Budget":
        """What is left."""
        return replace(
            self,
            escalations=self.escalations - escalations,
            samples=self.samples - samples,
            hooks=self.hooks - hooks,
            tokens=None if self.tokens is None else max(0, self.tokens - tokens),
        )


@dataclass(frozen=True, slots=True)
class Decision:
    """An action and why, in words that hold nothing of the request.

    Attributes:
        action: what to do.
        reason: why.
        samples: how many to vote over, of the action ``sample``.
        exhausted: whether it stands in place of an action that the budget does not allow.
    """

    action: Action
    reason: str
    samples: int = 0
    exhausted: bool = False


def decide(confidence: float | None, rule: Rule, budget: Budget) -> Decision:
    """What to do with a response that has stated ``confidence`` and nothing else yet.

    Args:
        confidence: s in [0, 1], or None if it is invalid.
        rule: the tier's.
        budget: what the request may still spend; an action beyond it becomes ``budget.exhausted``.

    Raises:
        ValueError: the confidence is no number from 0 to 1.
    """
    if confidence is not None and not 0 <= confidence <= 1:
        raise ValueError(f"a confidence should be None or lie in [0, 1], found {confidence}")
    if budget.tokens == 0:
        return Decision("refuse", "the request's tokens are spent")
    wanted = _wanted(confidence, rule)
    lacking = {
        "escalate": budget.escalations < 1 and "no further tier is allowed",
        "sample": budget.samples < 2 and "no further samples are allowed",
        "hook": budget.hooks < 1 and "no further call of the hook is allowed",
    }.get(wanted.action)
    if lacking:
        return Decision(budget.exhausted, f"{wanted.reason}, but {lacking}", exhausted=True)
    if wanted.action == "sample" and wanted.samples > budget.samples:
        return replace(wanted, samples=budget.samples, reason=f"{wanted.reason}, capped at {budget.samples} samples")
    return wanted


def _wanted(confidence: float | None, rule: Rule) -> Decision:
    if confidence is None:
        return Decision(rule.invalid, "no valid confidence")
    if isinstance(rule, ThresholdRule):
        band = next(band for band in rule.bands if confidence >= band.at_least)
        return Decision(band.action, f"confidence {confidence:.4g} is at least {band.at_least:g}", band.samples)
    # Ties go to the action that is named first: an answer rather than a refusal.
    costs: dict[Action, float] = {
        "answer": rule.answer + (1 - confidence) * rule.error,
        "escalate": rule.escalate,
        "refuse": rule.refusal,
    }
    action = min(costs, key=lambda name: costs[name])
    shown = ", ".join(f"{name} {cost:.4g}" for name, cost in costs.items())
    return Decision(action, f"expected costs at confidence {confidence:.4g}: {shown}")


@dataclass(frozen=True, slots=True)
class AnswerGate:
    """A second look, at the whole answer.

    Attributes:
        mean_log_prob: the least that the answer's tokens may have on average, in nats; None: not looked at.
        cut_off: whether an answer that the length limit cut off may pass.
        otherwise: what to do with an answer that does not pass.
    """

    mean_log_prob: float | None = None
    cut_off: bool = True
    otherwise: Literal["refuse", "escalate"] = "escalate"


def decide_after(gate: AnswerGate, budget: Budget, *, cut_off: bool, mean_log_prob: float | None) -> Decision:
    """Whether a whole answer may be given.

    Args:
        gate: the tier's.
        budget: what the request may still spend.
        cut_off: the length limit ended the answer.
        mean_log_prob: of the answer's tokens, nats; None where the engine gave none, which does not pass either.
    """
    if cut_off and not gate.cut_off:
        failed = "the answer was cut off"
    elif gate.mean_log_prob is not None and mean_log_prob is None:
        failed = "the answer came without log-probs"
    elif gate.mean_log_prob is not None and mean_log_prob is not None and mean_log_prob < gate.mean_log_prob:
        failed = f"the answer's mean log-prob {mean_log_prob:.3g} is below {gate.mean_log_prob:g}"
    else:
        return Decision("answer", "the answer passed the second gate")
    if gate.otherwise == "escalate" and (budget.escalations < 1 or budget.tokens == 0):
        return Decision(budget.exhausted, f"{failed}, but no further tier is allowed", exhausted=True)
    return Decision(gate.otherwise, failed)
