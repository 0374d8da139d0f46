"""Compute an advantage for each segment of graded responses, for all engines (paper, section 3.3)."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from coca_mindspeed.algorithm import check_tensor
from coca_mindspeed.algorithm.advantages import Advantage, Normalisation, Reduce
from coca_mindspeed.algorithm.methods.base import GroupOutcomes
from coca_mindspeed.algorithm.methods.settings import MethodSettings
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
        nothing_PG = torch.zeros_like(self.confidence_reward, dtype=torch.float32)
        return {name: nothing_PG if own is None else own.values for name, own in self.segments.items()}


@dataclass(frozen=True, slots=True)
class CreditRule:
    """Rule that turns the rewards of a method's stage into advantages.

    Attributes:
        settings: the method's settings.
        stage: index into the method's stages; None: it has only one.
    """

    settings: MethodSettings
    stage: int | None = None

    def __post_init__(self) -> None:
        """Raise ValueError for a stage that the method does not have."""
        object.__setattr__(self, "stage", self.settings.checked_stage(self.stage))

    @property
    def segments(self) -> tuple[str, ...]:
        """Names of a response's segments, in order."""
        return SEGMENTS[self.settings.training_method.confidence_position]

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
            log_probs: float ``[P, G]``, of each confidence segment under the policy that sampled it, for settings that
                read them.  Those of invalid responses are not read.
            reduce: adds the sum of squares and the number of centred rewards over the processes that share a step, so
                that ``batch`` has one deviation in all of them; None: this process has the whole step.
            stated_after: like ``stated``, for a method that asks for a second confidence after the answer.

        Raises ValueError: a wrong shape or dtype, a value out of its range, or no log-probs for settings that read
        them.
        """
        check_tensor("correct", correct, "float", "prompts", "group")
        if correct.shape[1] < 2:
            raise ValueError(f"correct should have at least 2 responses in a group, found {list(correct.shape)}")
        if not bool(((correct == 0) | (correct == 1) | correct.isnan()).all()):
            raise ValueError("correct should be 1, 0 or NaN (ungradable), found another number")
        method = self.settings.training_method
        if self.settings.reads_log_probs and (log_probs is None or log_probs.shape != correct.shape):
            raise ValueError(f"the settings of {method.name} need log_probs, float {list(correct.shape)}")
        if "confidence_after" in self.segments and stated_after is None:
            raise ValueError(f"{method.name} needs stated_after, float {list(correct.shape)}")
        few_P1 = (~correct.isnan()).sum(dim=1, keepdim=True) < 2
        members_PG = correct.double().masked_fill(few_P1, torch.nan)
        stated = _stated("stated", stated, members_PG)
        bonus_PG = None
        if self.settings.reads_log_probs and log_probs is not None:
            of_valid_PG = log_probs.double().masked_fill(stated.isnan(), 0.0)
            if not bool(of_valid_PG.isfinite().all()):
                raise ValueError("log_probs of valid confidences should be finite, found NaN or infinity")
            bonus_PG = self.settings.confidence_bonus(of_valid_PG).masked_fill(stated.isnan(), 0.0)
        outcomes = GroupOutcomes(
            correct=members_PG,
            stated=stated,
            gesr=members_PG.nanmean(dim=1, keepdim=True),
            bonus=bonus_PG,
            invalid_reward=self.settings.invalid_reward,
            stated_after=None if stated_after is None else _stated("stated_after", stated_after, members_PG),
        )
        chosen, stage = self.settings, method.stages[self.settings.checked_stage(self.stage)]
        normalise = Normalisation(
            chosen.advantage_scale, chosen.advantage_ddof, chosen.advantage_eps, chosen.separate_format, reduce
        )
        advantages = method.advantages(outcomes, normalise, stage)
        if unknown := advantages.keys() - set(self.segments):
            raise ValueError(
                f"{method.name} gives credit to {min(unknown)!r}, expected one of {', '.join(self.segments)}"
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
    exact_PG = stated if stated.dtype == torch.float64 else stated.double().round(decimals=7)
    return exact_PG.masked_fill(members.isnan(), torch.nan)
