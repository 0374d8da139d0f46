"""RLVR: GRPO on correctness alone, ``r = 1[answer is correct]``, on every token; the confidence earns nothing."""

from dataclasses import dataclass

from coca_mindspeed.algorithm.methods.base import GroupOutcomes, OneReward, Tensor


@dataclass(frozen=True)
class Rlvr(OneReward):
    name: str = "rlvr"

    def reward(self, outcomes: GroupOutcomes, stage: str) -> Tensor:
        return outcomes.correct
