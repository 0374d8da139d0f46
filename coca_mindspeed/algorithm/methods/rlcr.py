"""RLCR (Damani et al., 2025): the answer first, then the confidence; one reward on every token,

    r = 1[y] - (s - 1[y])^2

The target of the Brier score is the response's own correctness.
"""

from dataclasses import dataclass

from coca_mindspeed.algorithm.methods.base import GroupOutcomes, OneReward, Tensor
from coca_mindspeed.algorithm.parsing import ANSWER_FIRST_PROMPT, ConfidencePosition


@dataclass(frozen=True)
class Rlcr(OneReward):
    name: str = "rlcr"
    system_prompt: str = ANSWER_FIRST_PROMPT
    confidence_position: ConfidencePosition = "last"

    def reward(self, outcomes: GroupOutcomes, stage: str) -> Tensor:
        return outcomes.correct + outcomes.brier(outcomes.correct)
