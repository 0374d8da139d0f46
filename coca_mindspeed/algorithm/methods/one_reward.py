"""Methods with one reward, which falls on every token: RLVR, the paper's ablations of CoCA, and RLCR."""

from dataclasses import dataclass

from coca_mindspeed.algorithm.methods.base import GroupOutcomes, OneReward, Tensor
from coca_mindspeed.algorithm.parsing import ConfidencePosition


@dataclass(frozen=True)
class Rlvr(OneReward):
    """GRPO on correctness alone, ``r = 1[answer is correct]``; the confidence earns nothing."""

    name: str = "rlvr"
    rewards_confidence: bool = False

    def reward(self, outcomes: GroupOutcomes, stage: str) -> Tensor:
        return outcomes.correct


@dataclass(frozen=True)
class Joint(OneReward):
    """The ablation without segments (paper, section 4.5): ``r = r_a + r_c``, the sum of CoCA's rewards."""

    name: str = "joint"

    def reward(self, outcomes: GroupOutcomes, stage: str) -> Tensor:
        return outcomes.correct + outcomes.brier(outcomes.gesr)


@dataclass(frozen=True)
class Sequential(OneReward):
    """The ablation in two stages (paper, section 4.5): first ``r_a`` alone, then ``r_c`` alone.

    It is the paper's case of reward hacking: in the second stage short wrong answers with low confidence earn the most.
    """

    name: str = "sequential"
    stages: tuple[str, ...] = ("accuracy", "confidence")

    def reward(self, outcomes: GroupOutcomes, stage: str) -> Tensor:
        return outcomes.correct if stage == "accuracy" else outcomes.brier(outcomes.gesr)


@dataclass(frozen=True)
class Rlcr(OneReward):
    """RLCR (Damani et al., 2025): the answer first, then the confidence; ``r = 1[y] - (s - 1[y])^2``.

    The target of the Brier score is the response's own correctness.
    """

    name: str = "rlcr"
    confidence_position: ConfidencePosition = "last"

    def reward(self, outcomes: GroupOutcomes, stage: str) -> Tensor:
        return outcomes.correct + outcomes.brier(outcomes.correct)
