"""Compute an advantage for each segment of graded responses, for all engines (paper, section 3.3)."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from coca_mindspeed.algorithm import check_tensor
from coca_mindspeed.algorithm.advantages import Advantage, AdvantageScale, Normalisation, Reduce
from coca_mindspeed.algorithm.methods.base import GroupOutcomes, TrainingMethod
from coca_mindspeed.algorithm.parsing import SEGMENTS


class Credit(NamedTuple):
    """Rewards and advantages of P prompts with G responses each, on the CPU.  NaN: takes no part.

    Attributes:
        gesr: float64 ``[P, 1]``, the success rate of each group's gradable answers; NaN where the group is dropped,
            because fewer than two of its answers could be graded.
        confidence_reward: float64 ``[P, G]``, the Brier score against GESR, whatever the method rewards.
        segments: advantage of each segment, in the order of the response; None: advantage 0 everywhere.
        deviation: the step's deviation that ``batch`` divides by, of the first segment that has one; 0 with another
            scale.
    """

    gesr: Tensor
    confidence_reward: Tensor
    segments: dict[str, Advantage | None]
    deviation: float

    @property
    def group_size(self) -> int:
        """G."""
        return self.confidence_reward.shape[1]

    @property
    def kept(self) -> Tensor:
        """Mask of the groups that were not dropped, bool ``[P]``."""
        return ~self.gesr[:, 0].isnan()

    def values_by_segment(self) -> dict[str, Tensor]:
        """Advantages by segment, float32 ``[P, G]``; 0 for a segment without one."""
        nothing = torch.zeros_like(self.confidence_reward, dtype=torch.float32)
        return {name: nothing if own is None else own.values for name, own in self.segments.items()}


@dataclass(frozen=True, slots=True)
class CreditRule:
    """Rule that turns a method's rewards into advantages.

    Attributes:
        method: the rewards of each segment, and the order of the segments.
        stage: index into the method's stages.
        invalid_reward: confidence reward of a response without a valid confidence.
        ddof: of the groups' deviation; 1 is the sample's, 0 the population's.
        eps: added to the deviation.
        separate_format: normalise the scores of confidences over the valid responses alone, and add the normalised 0/1
            reward of being valid.  In the paper's form (False) one invalid response among eight, with its reward of -1,
            shrinks the differences among the valid ones 5 to 40 times.  It has no effect if all responses are valid,
            and applies to methods whose confidence has a reward of its own.
        entropy_bonus: weight of ``-log pi(confidence segment)`` in the reward of a valid confidence; for ``coca``.  Its
            expectation is the entropy of the segment, which keeps the policy from stating one confidence everywhere.
        scale: divisor of a group's centred rewards: its own deviation plus eps (``group``, the paper's), one deviation
            of the centred rewards of the whole step (``batch``), or 1 (``none``).  It applies to the scores of a
            confidence segment with a reward of its own, and to the one reward of another method.  Answer and format
            advantages of the former always have the group's scale.
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
                ``entropy_bonus``.  Those of invalid responses are not read.
            reduce: adds the sum of squares and the number of centred rewards over the processes that share a step, so
                that ``batch`` has one deviation in all of them; None: this process has the whole step.
            stated_after: like ``stated``, for a method that asks for a second confidence after the answer.

        Raises:
            ValueError: a wrong shape or dtype, a value out of its range, or an entropy bonus without log-probs.
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
        few = (~correct.isnan()).sum(dim=1, keepdim=True) < 2
        members = correct.double().masked_fill(few, torch.nan)
        stated = _stated("stated", stated, members)
        bonus = None
        if self.entropy_bonus and log_probs is not None:
            of_valid = log_probs.double().masked_fill(stated.isnan(), 0.0)
            if not bool(of_valid.isfinite().all()):
                raise ValueError("log_probs of valid confidences should be finite, found NaN or infinity")
            bonus = -self.entropy_bonus * of_valid
        outcomes = GroupOutcomes(
            correct=members,
            stated=stated,
            gesr=members.nanmean(dim=1, keepdim=True),
            entropy_bonus=bonus,
            invalid_reward=self.invalid_reward,
            stated_after=None if stated_after is None else _stated("stated_after", stated_after, members),
        )
        normalise = Normalisation(self.scale, self.ddof, self.eps, self.separate_format, reduce)
        advantages = self.method.advantages(outcomes, normalise, self.method.stages[self.stage])
        if unknown := advantages.keys() - set(self.segments):
            raise ValueError(
                f"{self.method.name} gives credit to {min(unknown)!r}, expected one of {', '.join(self.segments)}"
            )
        by_segment = {name: advantages.get(name) for name in self.segments}
        deviation = next((one.deviation for one in by_segment.values() if one and one.deviation), 0.0)
        return Credit(outcomes.gesr, outcomes.brier(outcomes.gesr), by_segment, deviation)


def _stated(name: str, stated: Tensor, members: Tensor) -> Tensor:
    """Stated confidences as float64, NaN for responses that are no ``members`` of their group."""
    check_tensor(name, stated, "float", *members.shape, device=members.device)
    if bool(((stated < 0) | (stated > 1)).any()):
        raise ValueError(f"{name} should be in [0, 1] or NaN (invalid), found {stated.min()} to {stated.max()}")
    # Decimals through float32, as ms-swift hands them on: rewards that are equal by definition would differ by 1e-8.
    exact = stated if stated.dtype == torch.float64 else stated.double().round(decimals=7)
    return exact.masked_fill(members.isnan(), torch.nan)
