"""CoCA (Li et al., 2026, section 3.3): each segment earns its own reward.

With ``p`` the group's success rate and ``s`` the stated confidence,

    confidence tokens:  r_c = -(s - p)^2            answer tokens:  r_a = 1[answer is correct]

and each advantage is normalised within the group.
"""

from dataclasses import dataclass

from coca_mindspeed.algorithm.methods.base import GroupOutcomes, MethodDefaults, Normalisation, SegmentAdvantages


@dataclass(frozen=True)
class Coca(MethodDefaults):
    """The paper's method, with ``entropy_bonus`` of :class:`CreditRule`."""

    name: str = "coca"

    def advantages(self, outcomes: GroupOutcomes, normalise: Normalisation, stage: str) -> SegmentAdvantages:
        brier = outcomes.brier(outcomes.gesr)
        if outcomes.entropy_bonus is not None:
            brier = brier + outcomes.entropy_bonus
        return {
            "confidence": normalise.of_confidence(brier, outcomes.stated),
            "answer": normalise.within_group(outcomes.correct),
        }
