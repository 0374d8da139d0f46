"""Rewarding Doubt (Bani-Harouni et al., 2025, arXiv 2503.02623): the answer first, then a confidence with a log score.

With ``s`` clipped to .001 ... .999,

    confidence tokens:  r_c = log(s) if the answer is correct, else log(1 - s)        answer tokens:  nothing

In the public code the answer is part of PPO's query, so that its tokens are not trained.  The score is divided by
``log 1000``, so that the worst is -1 as the Brier score's.  Left out: the code's bonus for a correct answer, which no
confidence can change, and PPO's critic; the group's mean is used instead.
"""

from dataclasses import dataclass
from math import log

from coca_mindspeed.algorithm.methods.base import GroupOutcomes, MethodDefaults, Normalisation, SegmentAdvantages
from coca_mindspeed.algorithm.parsing import ConfidencePosition

_LEAST = 0.001


@dataclass(frozen=True)
class LogScore(MethodDefaults):
    name: str = "log_score"
    confidence_position: ConfidencePosition = "last"

    def advantages(self, outcomes: GroupOutcomes, normalise: Normalisation, stage: str) -> SegmentAdvantages:
        of_outcome = (outcomes.correct + outcomes.stated - 1).abs()  # s if the answer is correct, else 1 - s
        score = of_outcome.clamp(_LEAST, 1 - _LEAST).log() / -log(_LEAST)
        return {"confidence": normalise.of_confidence(outcomes.scored(score, outcomes.stated), outcomes.stated)}
