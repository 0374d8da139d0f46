"""A grader and a custom method, which the loops of the engines name by this file."""

from dataclasses import dataclass

from coca_mindspeed.algorithm.methods.base import OneReward


@dataclass(frozen=True)
class Shy(OneReward):
    """Rewards a right answer, and a low confidence."""

    name: str = "shy"

    def reward(self, outcomes, stage):
        return outcomes.correct - outcomes.stated.nan_to_num(1.0)


def last_digit(record, answer):
    """Right is every answer that ends with the digit with which the gold answer ends."""
    return answer.strip()[-1:] == record.answer[-1]
