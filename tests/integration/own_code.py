"""A grader and a method of the user's own, which the loops of the engines name by this file."""

from dataclasses import dataclass

from torch import Tensor

from coca_mindspeed.algorithm.methods.base import GroupOutcomes, OneReward
from coca_mindspeed.data.records import Record


@dataclass(frozen=True)
class Shy(OneReward):
    """Rewards a right answer, and a low confidence."""

    name: str = "shy"

    def reward(self, outcomes: GroupOutcomes, stage: str) -> Tensor:
        return outcomes.correct - outcomes.stated.nan_to_num(1.0)


def even(record: Record, answer: str) -> bool:
    """Right is every answer to a question with an even gold answer."""
    return record.answer[-1] in "02468"
