"""Compute an advantage for each segment of graded responses, for all engines (paper, section 3.3)."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from coca_mindspeed.algorithm.advantages import Advantage, centred, group_advantages
from coca_mindspeed.algorithm.checks import check_tensor
from coca_mindspeed.algorithm.methods.base import Outcomes, TrainingMethod
from coca_mindspeed.algorithm.parsing import SEGMENTS

AdvantageScale = Literal["group", "batch", "none"]
#: Adds up (sum of squares, count) over all processes of a step.
Reduce = Callable[[float, int], tuple[float, int]]
_LEAST_DEVIATION = 1e-8  # added to the step's deviation


class Credit(NamedTuple):
    """Rewards and advantages of P prompts with G responses each, on the CPU.  NaN: takes no part.

    Attributes:
        gesr: float64 ``[P, 1]``, the success rate of each group's gradable answers; NaN where the group is dropped,
            because fewer than two of its answers could be graded.
        confidence_reward: float64 ``[P, G]``, the Brier score against GESR, whatever the method rewards.
        segments: advantage of each segment, in the order of the response; None: it learns nothing.
        deviation: the step's deviation that ``batch`` divides by, of the method's first reward; 0 with another scale.
    """

    gesr: Tensor
    confidence_reward: Tensor
    segments: dict[str, Advantage | None]
    deviation: float

    @property
    def kept(self) -> Tensor:
        """Mask of the groups that were not dropped, bool ``[P]``."""
        return ~self.gesr[:, 0].isnan()

    def values_by_segment(self) -> dict[str, Tensor]:
        """Advantages by segment, float32 ``[P, G]``; 0 for a segment that learns nothing."""
        nothing = torch.zeros_like(self.confidence_reward, dtype=torch.float32)
        return {name: nothing if own is None else own.values for name, own in self.segments.items()}


@dataclass(frozen=True, slots=True)
class CreditRule:
    """Rule that turns a method's rewards into advantages.

    Attributes:
        method: the rewards of each segment, and the order of the segments.
        stage: index into the method's stages.
        invalid_reward: confidence reward of a response without a valid confidence.
        scale: divisor of a group's centred rewards: its own deviation plus eps (``group``, the paper's), one deviation
            of the centred rewards of the whole step (``batch``), or 1 (``none``).  It applies to the Brier scores of a
            method whose confidence segment has a reward of its own, and to the one reward of another method.  Answer
            and format advantages of the former always have the group's scale.
        ddof: of the groups' deviation; 1 is the sample's, 0 the population's.
        eps: added to the deviation.
        separate_format: normalise the Brier scores over the valid responses alone, and add the normalised 0/1 reward
            of being valid.  In the paper's form (False) one invalid response among eight, with its reward of -1,
            shrinks the differences among the valid ones 5 to 40 times.  It has no effect if all responses are valid,
            and applies to methods whose confidence has a reward of its own.
        entropy_bonus: weight of ``-log pi(confidence segment)`` in the reward of a valid confidence; for ``coca``.  The
            expectation of that term is the entropy of the segment, which keeps the policy from stating one confidence
            everywhere.
    """

    method: TrainingMethod
    stage: int = 0
    invalid_reward: float = -1.0
    ddof: int = 1
    eps: float = 1e-6
    separate_format: bool = True
    entropy_bonus: float = 0.0
    scale: AdvantageScale = "group"

    @property
    def segments(self) -> tuple[str, ...]:
        """Names of a response's segments, in order."""
        return SEGMENTS[self.method.confidence_position]

    def __call__(
        self,
        correct: Tensor,
        stated: Tensor,
        log_probs: Tensor | None = None,
        reduce: Reduce | None = None,
        stated_after: Tensor | None = None,
        reserved: Tensor | None = None,
    ) -> Credit:
        """Give credit.

        Responses with an ungradable answer are left out of their group's GESR, rewards and advantages, and a group of
        fewer than two gradable answers is dropped.  Responses that take no part have the advantage 0, and so add
        nothing to the loss.

        Args:
            correct: float ``[P, G]``, with G at least 2: 1 or 0; NaN where the answer could not be graded.
            stated: float ``[P, G]``, the stated confidences in [0, 1]; NaN where the response is invalid.  A
                float32 value is rounded to seven decimals, which restores the decimal that was stated.
            log_probs: float ``[P, G]``, of each confidence segment under the policy that sampled it; for
                ``entropy_bonus``.
            reduce: adds the sum of squares and the number of centred rewards over the processes that share a step, so
                that ``batch`` has one deviation in all of them; None: this process has the whole step.
            stated_after: like ``stated``, for a method that asks for a second confidence after the answer.
            reserved: bool ``[P]``, the prompts whose confidences learn and whose answers do not; of the other prompts
                the answers learn and the confidences do not (``data.confidence_share``).  None: both learn on all.

        Raises:
            ValueError: a wrong shape or dtype, a value out of its range, an entropy bonus without log-probs, or
                reserved prompts with a method whose segments share a reward.
        """
        check_tensor("correct", correct, "float", "prompts", "group")
        if correct.shape[1] < 2:
            raise ValueError(f"correct should have at least 2 responses in a group, found {list(correct.shape)}")
        if not bool(((correct == 0) | (correct == 1) | correct.isnan()).all()):
            raise ValueError("correct should be 1, 0 or NaN (ungradable), found another number")
        if self.entropy_bonus and (log_probs is None or log_probs.shape != correct.shape):
            raise ValueError(f"entropy_bonus={self.entropy_bonus} needs log_probs, float {list(correct.shape)}")
        if "confidence_after" in self.segments and stated_after is None:
            raise ValueError(f"{self.method.name} needs stated_after, float {list(correct.shape)}")
        if reserved is not None:
            check_tensor("reserved", reserved, "bool", correct.shape[0])
            if not self.method.separate_rewards:
                raise ValueError(f"reserved prompts need a reward of each segment; {self.method.name} has one for both")
        few = (~correct.isnan()).sum(dim=1, keepdim=True) < 2
        members = correct.double().masked_fill(few, torch.nan)
        outcomes = Outcomes(
            correct=members,
            stated=_stated("stated", stated, members),
            gesr=members.nanmean(dim=1, keepdim=True),
            log_probs=None if log_probs is None else log_probs.double(),
            invalid_reward=self.invalid_reward,
            stated_after=None if stated_after is None else _stated("stated_after", stated_after, members),
        )
        normalise = Normalisation(self, reduce, reserved)
        advantages = self.method.advantages(outcomes, normalise, self.method.stages[self.stage])
        if reserved is not None and "answer" in advantages:
            values, varies = advantages["answer"]
            advantages["answer"] = Advantage(values.masked_fill(reserved[:, None], 0.0), varies & ~reserved)
        if unknown := advantages.keys() - set(self.segments):
            raise ValueError(
                f"{self.method.name} gives credit to {min(unknown)!r}, expected one of {', '.join(self.segments)}"
            )
        by_segment = {name: advantages.get(name) for name in self.segments}
        return Credit(outcomes.gesr, outcomes.brier(outcomes.gesr), by_segment, normalise.deviation)


def _stated(name: str, stated: Tensor, members: Tensor) -> Tensor:
    """Stated confidences as float64, NaN for responses that are no ``members`` of their group."""
    check_tensor(name, stated, "float", *members.shape, device=members.device)
    if bool(((stated < 0) | (stated > 1)).any()):
        raise ValueError(f"{name} should be in [0, 1] or NaN (invalid), found {stated.min()} to {stated.max()}")
    return stated_decimals(stated).masked_fill(members.isnan(), torch.nan)


def stated_decimals(stated: Tensor) -> Tensor:
    """Stated confidences as float64; a float32 is rounded to seven decimals, which restores the stated decimal."""
    return stated if stated.dtype == torch.float64 else stated.double().round(decimals=7)


class Normalisation:
    """Turns one step's rewards, float64 ``[P, G]`` with NaN for no part, into advantages."""

    def __init__(self, rule: CreditRule, reduce: Reduce | None, reserved: Tensor | None = None) -> None:
        self._rule, self._reduce, self._reserved = rule, reduce, reserved
        self.deviation = 0.0
        self.separate_format, self.entropy_bonus = rule.separate_format, rule.entropy_bonus

    def group(self, rewards: Tensor) -> Advantage:
        """Normalise by each group's own deviation."""
        return group_advantages(rewards, ddof=self._rule.ddof, eps=self._rule.eps)

    def stated(self, scores: Tensor, stated: Tensor) -> Advantage:
        """Normalise the scores of ``stated`` confidences by :attr:`CreditRule.scale` and ``separate_format``.

        Where prompts are reserved for the confidence, the others take no part.
        """
        if self._reserved is not None:
            scores = scores.masked_fill(~self._reserved[:, None], torch.nan)
        if not self.separate_format:
            return self.scaled(scores)
        valid = ~stated.isnan()
        among_valid = self.scaled(scores.masked_fill(~valid, torch.nan))
        return among_valid + self.group(valid.double().masked_fill(scores.isnan(), torch.nan))

    def scaled(self, rewards: Tensor) -> Advantage:
        """Normalise a method's one reward by :attr:`CreditRule.scale`."""
        if self._rule.scale == "group":
            return self.group(rewards)
        offsets, varies = centred(rewards)
        if self._rule.scale == "batch":
            taking_part = ~rewards.isnan()
            # fsum does not depend on the order of the groups.
            squares, count = math.fsum(offsets[taking_part].square().tolist()), int(taking_part.sum())
            if self._reduce is not None:
                squares, count = self._reduce(squares, count)
            deviation = math.sqrt(squares / max(1, count)) + _LEAST_DEVIATION
            self.deviation = self.deviation or deviation
            offsets = offsets / deviation
        return Advantage(offsets.to(torch.float32), varies)
