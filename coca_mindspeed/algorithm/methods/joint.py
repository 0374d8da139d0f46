"""The ablation without segments (paper, section 4.5): ``r = r_a + r_c``, the sum of CoCA's rewards, on every token."""

from dataclasses import dataclass

from coca_mindspeed.algorithm.methods.base import GroupOutcomes, OneReward, Tensor


@dataclass(frozen=True)
class Joint(OneReward):
    name: str = "joint"

    def reward(self, outcomes: GroupOutcomes, stage: str) -> Tensor:
        return outcomes.correct + outcomes.brier(outcomes.gesr)
