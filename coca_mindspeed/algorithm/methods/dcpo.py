"""DCPO (Ma et al., 2026, arXiv 2603.09117): the answer first, then the confidence; each segment earns its own reward.

With ``p`` the group's success rate and ``t = (r_a + p) / 2``,

    answer tokens:  r_a = 1[answer is correct]        confidence tokens:  r_c = -(s - t)^2 / 2

The two weights of 1/2 are those of the public code, which gives correctness to the confidence tokens as well; here each
reward stays on its own tokens, as in the paper.  Summaries of the paper give ``-|s - t|``, which is no proper score.
"""

from dataclasses import dataclass

from coca_mindspeed.algorithm.methods.base import GroupOutcomes, MethodDefaults, Normalisation, SegmentAdvantages
from coca_mindspeed.algorithm.parsing import ConfidencePosition


@dataclass(frozen=True)
class Dcpo(MethodDefaults):
    name: str = "dcpo"
    confidence_position: ConfidencePosition = "last"

    def advantages(self, outcomes: GroupOutcomes, normalise: Normalisation, stage: str) -> SegmentAdvantages:
        target = (outcomes.correct + outcomes.gesr) / 2
        score = outcomes.scored(-(outcomes.stated - target).square() / 2, outcomes.stated)
        return {
            "answer": normalise.within_group(outcomes.correct),
            "confidence": normalise.of_confidence(score, outcomes.stated),
        }
