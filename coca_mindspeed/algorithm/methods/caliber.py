"""CALIBER (Finlay et al., 2026, arXiv 2606.24281): a confidence before the answer and another one after it.

With ``p`` the group's success rate, ``s`` the first confidence and ``t`` the second,

    first confidence:  -(s - p)^2        answer:  r_a = 1[answer is correct]        second confidence:  -(t - r_a)^2

The abstract gives the two targets, and summaries that the first confidence is rewarded alone in a warm-up.  The exact
rewards were not available to us: that they are Brier scores, each on its own tokens, and that nothing else is rewarded
in the warm-up, is our reading.  Reports and metrics take the first confidence for the stated one.
"""

from dataclasses import dataclass

from coca_mindspeed.algorithm.methods.base import GroupOutcomes, MethodDefaults, Normalisation, SegmentAdvantages
from coca_mindspeed.algorithm.parsing import ConfidencePosition


@dataclass(frozen=True)
class Caliber(MethodDefaults):
    name: str = "caliber"
    confidence_position: ConfidencePosition = "both"
    stages: tuple[str, ...] = ("warm-up", "train")

    def advantages(self, outcomes: GroupOutcomes, normalise: Normalisation, stage: str) -> SegmentAdvantages:
        after = outcomes.stated_after
        assert after is not None
        first = normalise.of_confidence(outcomes.brier(outcomes.gesr), outcomes.stated)
        if stage == "warm-up":
            return {"confidence": first}
        return {
            "confidence": first,
            "answer": normalise.within_group(outcomes.correct),
            "confidence_after": normalise.of_confidence(outcomes.brier(outcomes.correct, after), after),
        }
