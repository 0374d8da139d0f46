"""CoCA (Li et al., 2026, section 3.3): each segment earns its own reward.

With ``p`` the group's success rate and ``s`` the stated confidence,

    confidence tokens:  r_c = -(s - p)^2            answer tokens:  r_a = 1[answer is correct]

and each advantage is normalised within the group.  GDPO puts the sum of both advantages on every token.
"""

from dataclasses import dataclass

from coca_mindspeed.algorithm.methods.base import (
    GroupOutcomes,
    MethodDefaults,
    Normalisation,
    SegmentAdvantages,
    Tensor,
)
from coca_mindspeed.algorithm.methods.settings import MethodSettings, setting


@dataclass(frozen=True, kw_only=True)
class CocaMethodSettings(MethodSettings, method="coca"):
    """Settings of CoCA.

    Attributes:
        entropy_bonus: weight of ``-log pi(confidence segment)`` in the reward of a valid confidence.  Its expectation
            is the entropy of the segment, which keeps the policy from stating one confidence everywhere.
    """

    entropy_bonus: float = setting(0.0, "coca: weight of the confidence's entropy in its reward", ge=0, le=1)

    @property
    def reads_log_probs(self) -> bool:
        return self.entropy_bonus > 0

    def confidence_bonus(self, log_probs: Tensor) -> Tensor:
        return -self.entropy_bonus * log_probs


@dataclass(frozen=True)
class Coca(MethodDefaults):
    """The paper's method, with an entropy bonus."""

    name: str = "coca"

    def advantages(self, outcomes: GroupOutcomes, normalise: Normalisation, stage: str) -> SegmentAdvantages:
        brier = outcomes.brier(outcomes.gesr)
        if outcomes.bonus is not None:
            brier = brier + outcomes.bonus
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
