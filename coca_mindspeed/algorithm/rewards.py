"""Rewards (paper, equations 6 to 8), and which segment of a response earns which of them in each training method.

Every tensor is ``[prompts, group]``: a row is one prompt with all G of its samples, so a group is whole by
construction.  Rewards are float64: two confidences that are equally far from p must earn the same, and what float32
makes of .1 and .9 differs by a tenth of the eps that advantages are normalised with.

Configurations name the methods of this module, so it imports torch, which takes seconds, only to compute with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

from coca_mindspeed.algorithm.parsing import ANSWER_FIRST_PROMPT, CONFIDENCE_FIRST_PROMPT, ConfidencePosition

if TYPE_CHECKING:
    from torch import Tensor


class SegmentRewards(NamedTuple):
    """What each segment's tokens earn, float64 ``[prompts, group]`` both; equal where a method has one reward."""

    confidence: Tensor
    answer: Tensor


def answer_reward(correct: Tensor) -> Tensor:
    """``r_a = 1[answer is correct]`` (equation 6): bool ``[prompts, group]`` to float64 of the same shape."""
    import torch

    if correct.dtype != torch.bool or correct.dim() != 2:
        raise ValueError(f"correct should be bool [prompts, group], found {correct.dtype} {tuple(correct.shape)}")
    return correct.to(torch.float64)


def group_success_rate(correct: Tensor) -> Tensor:
    """GESR, the share of right answers in each group (equation 7).

    bool ``[prompts, group]`` to float64 ``[prompts, 1]``.
    """
    return answer_reward(correct).mean(dim=1, keepdim=True)


def brier_reward(confidence: Tensor, target: Tensor, invalid_reward: float = -1.0) -> Tensor:
    """``r_c = -(s - p)^2`` (equation 8).

    Args:
        confidence: float ``[prompts, group]`` in [0, 1]; NaN marks an invalid response.  float32 is taken for the
            decimal that was stated: the one of seven digits next to it.
        target: p, float, broadcastable to ``confidence``.
        invalid_reward: what an invalid response earns; the default is the worst Brier score there is.

    Returns:
        float64 ``[prompts, group]``.

    Raises:
        ValueError: a confidence outside of [0, 1], or different devices.
    """
    import torch

    if not confidence.is_floating_point() or confidence.dim() != 2:
        raise ValueError(
            f"confidence should be float [prompts, group], found {confidence.dtype} {tuple(confidence.shape)}"
        )
    if confidence.device != target.device:
        raise ValueError(f"confidence is on {confidence.device}, target on {target.device}")
    if bool(((confidence < 0) | (confidence > 1)).any()):
        raise ValueError(f"confidence should be in [0, 1] or NaN, found {confidence.min()} to {confidence.max()}")
    stated = confidence.to(torch.float64)
    if confidence.dtype != torch.float64:
        stated = stated.round(decimals=7)
    return torch.where(stated.isnan(), invalid_reward, -(stated - target).square())


class TrainingMethod(Protocol):
    """One of the training methods that the paper compares."""

    @property
    def name(self) -> str: ...

    @property
    def system_prompt(self) -> str:
        """Tells the model the response format."""
        ...

    @property
    def confidence_position(self) -> ConfidencePosition:
        """Whether the confidence is stated before the answer or after it."""
        ...

    @property
    def stages(self) -> tuple[str, ...]:
        """Names of the training stages, run one after the other; all but ``sequential`` have one."""
        ...

    def rewards(
        self, correct: Tensor, confidence: Tensor, *, stage: int = 0, invalid_reward: float = -1.0
    ) -> SegmentRewards:
        """Rewards of each segment.

        Args:
            correct: bool ``[prompts, group]``.
            confidence: float ``[prompts, group]``, NaN where the response is invalid.
            stage: index into :attr:`stages`.
            invalid_reward: confidence reward of an invalid response.
        """
        ...


@dataclass(frozen=True)
class _ConfidenceFirst:
    """What the confidence-first methods share; a subclass says who earns what."""

    system_prompt: str = CONFIDENCE_FIRST_PROMPT
    confidence_position: ConfidencePosition = "first"
    stages: tuple[str, ...] = ("train",)


@dataclass(frozen=True)
class CoCA(_ConfidenceFirst):
    """The paper's method: the confidence segment earns the Brier score against GESR, the answer its correctness."""

    name: str = "coca"

    def rewards(
        self, correct: Tensor, confidence: Tensor, *, stage: int = 0, invalid_reward: float = -1.0
    ) -> SegmentRewards:
        return SegmentRewards(
            confidence=brier_reward(confidence, group_success_rate(correct), invalid_reward),
            answer=answer_reward(correct),
        )


@dataclass(frozen=True)
class RLVR(_ConfidenceFirst):
    """GRPO on correctness alone; the confidence is verbalised but earns nothing of its own."""

    name: str = "rlvr"

    def rewards(
        self, correct: Tensor, confidence: Tensor, *, stage: int = 0, invalid_reward: float = -1.0
    ) -> SegmentRewards:
        reward = answer_reward(correct)
        return SegmentRewards(confidence=reward, answer=reward)


@dataclass(frozen=True)
class Joint(_ConfidenceFirst):
    """The ablation without segments: the sum of CoCA's two rewards on every token."""

    name: str = "joint"

    def rewards(
        self, correct: Tensor, confidence: Tensor, *, stage: int = 0, invalid_reward: float = -1.0
    ) -> SegmentRewards:
        reward = answer_reward(correct) + brier_reward(confidence, group_success_rate(correct), invalid_reward)
        return SegmentRewards(confidence=reward, answer=reward)


@dataclass(frozen=True)
class Sequential(_ConfidenceFirst):
    """First correctness alone, then confidence alone, each on every token: the paper's case of reward hacking."""

    name: str = "sequential"
    stages: tuple[str, ...] = ("accuracy", "confidence")

    def rewards(
        self, correct: Tensor, confidence: Tensor, *, stage: int = 0, invalid_reward: float = -1.0
    ) -> SegmentRewards:
        if self.stages[stage] == "accuracy":
            reward = answer_reward(correct)
        else:
            reward = brier_reward(confidence, group_success_rate(correct), invalid_reward)
        return SegmentRewards(confidence=reward, answer=reward)


@dataclass(frozen=True)
class RLCR:
    """Answer first (Damani et al., 2025): ``1[y] - (s - 1[y])^2``, on every token; s is judged by its own response."""

    name: str = "rlcr"
    system_prompt: str = ANSWER_FIRST_PROMPT
    confidence_position: ConfidencePosition = "last"
    stages: tuple[str, ...] = ("train",)

    def rewards(
        self, correct: Tensor, confidence: Tensor, *, stage: int = 0, invalid_reward: float = -1.0
    ) -> SegmentRewards:
        right = answer_reward(correct)
        reward = right + brier_reward(confidence, right, invalid_reward)
        return SegmentRewards(confidence=reward, answer=reward)


METHODS: dict[str, TrainingMethod] = {m.name: m for m in (CoCA(), RLVR(), Joint(), Sequential(), RLCR())}


def training_method(name: str) -> TrainingMethod:
    """The method called ``name``.

    Raises:
        ValueError: there is none; the message lists those that there are.
    """
    if name not in METHODS:
        raise ValueError(f"unknown training method {name!r}; known methods: {', '.join(METHODS)}")
    return METHODS[name]
