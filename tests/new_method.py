"""A training method as somebody would add one: one class, and one line of YAML that names it."""

from dataclasses import dataclass

from coca_mindspeed.algorithm.credit import Normalisation
from coca_mindspeed.algorithm.methods.base import MethodDefaults, Outcomes, SegmentAdvantages


@dataclass(frozen=True)
class Doubt(MethodDefaults):
    """Rewards nothing but low confidence."""

    name: str = "doubt"

    def advantages(self, outcomes: Outcomes, normalise: Normalisation, stage: str) -> SegmentAdvantages:
        doubt = (-outcomes.stated).masked_fill(outcomes.stated.isnan(), outcomes.invalid_reward)
        doubt = doubt.masked_fill(outcomes.correct.isnan(), float("nan"))
        return SegmentAdvantages(confidence=normalise.scaled(doubt), answer=normalise.group(0 * outcomes.correct))
