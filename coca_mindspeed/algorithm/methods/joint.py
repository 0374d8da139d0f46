"""The ablation without segments (paper, section 4.5): ``r = r_a + r_c``, the sum of CoCA's rewards, on every token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from coca_mindspeed.algorithm.methods.base import OneReward, Outcomes

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Joint(OneReward):
    name: str = "joint"

    def reward(self, outcomes: Outcomes, stage: str) -> Tensor:
        return outcomes.correct + outcomes.brier(outcomes.gesr)
