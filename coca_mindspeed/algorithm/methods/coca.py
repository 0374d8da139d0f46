"""CoCA (Li et al., 2026, section 3.3): each segment earns its own reward.

With ``p`` the group's success rate and ``s`` the stated confidence,

    confidence tokens:  r_c = -(s - p)^2            answer tokens:  r_a = 1[answer is correct]

and each advantage is normalised within the group.  GDPO puts the sum of both advantages on every token.
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


@dataclass(frozen=True)
class Gdpo(Coca):
    """GDPO (Liu et al., 2026, arXiv 2601.05242) with CoCA's rewards: ``A = A_c + A_a`` on every token.

    It differs from ``joint`` in the normalisation alone, and from ``coca`` in the tokens alone.  verl and TRL have it
    under this name; their last step, which whitens the sum over the batch, is left out for this comparison.
    """

    name: str = "gdpo"

    def advantages(self, outcomes: GroupOutcomes, normalise: Normalisation, stage: str) -> SegmentAdvantages:
        own = super().advantages(outcomes, normalise, stage)
        return dict.fromkeys(own, own["confidence"] + own["answer"])
