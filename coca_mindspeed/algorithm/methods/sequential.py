"""The ablation in two stages (paper, section 4.5): first ``r_a`` alone, then ``r_c`` alone, on every token.

It is the paper's case of reward hacking: in the second stage short wrong answers with low confidence earn the most.
"""

from dataclasses import dataclass

from coca_mindspeed.algorithm.methods.base import GroupOutcomes, OneReward, Tensor


@dataclass(frozen=True)
class Sequential(OneReward):
    name: str = "sequential"
    stages: tuple[str, ...] = ("accuracy", "confidence")

    def reward(self, outcomes: GroupOutcomes, stage: str) -> Tensor:
        return outcomes.correct if stage == "accuracy" else outcomes.brier(outcomes.gesr)
