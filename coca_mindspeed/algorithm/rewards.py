"""Rewards (paper, equations 6 to 8), and which segment of a response earns which of them in each training method.

Every tensor is ``[prompts, group]``: a row is one prompt with all G of its samples, so a group is whole by
construction.  Rewards are float64: two confidences that are equally far from p must earn the same, and what float32
makes of .1 and .9 differs by a tenth of the eps that advantages are normalised with.

Configurations name the methods of this module, so it imports torch, which takes seconds, only to compute with it.
"""

from __future__ import annotations

from collections.abc import Callable
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
    from coca_mindspeed.algorithm.checks import check_tensor

    check_tensor("correct", correct, "bool", "prompts", "group")
    return correct.double()


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

    from coca_mindspeed.algorithm.checks import check_tensor

    check_tensor("confidence", confidence, "float", "prompts", "group", device=target.device)
    if bool(((confidence < 0) | (confidence > 1)).any()):
        raise ValueError(f"confidence should be in [0, 1] or NaN, found {confidence.min()} to {confidence.max()}")
    stated = confidence.to(torch.float64)
    if confidence.dtype != torch.float64:
        stated = stated.round(decimals=7)
    return torch.where(stated.isnan(), invalid_reward, -(stated - target).square())


class TrainingMethod(Protocol):
    """A training method: which segment earns what, and the response format."""

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
        """Names of the training stages, run one after the other."""
        ...

    @property
    def has_confidence_reward(self) -> bool:
        """Whether the confidence segment earns a reward of its own; False: one reward falls on every token."""
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
class _Method:
    """A method that rewards a combination of correctness and Brier score.

    Attributes:
        combine: from the answer reward, the Brier score and the stage's name to the rewards.
        own_target: the Brier score is against the response's own correctness; otherwise against GESR.
        has_confidence_reward: see :class:`TrainingMethod`.
    """

    name: str
    combine: Callable[[Tensor, Tensor, str], SegmentRewards]
    system_prompt: str = CONFIDENCE_FIRST_PROMPT
    confidence_position: ConfidencePosition = "first"
    stages: tuple[str, ...] = ("train",)
    own_target: bool = False
    has_confidence_reward: bool = False

    def __reduce__(self) -> tuple[Callable[[str], TrainingMethod], tuple[str]]:
        return training_method, (self.name,)  # the functions in METHODS cannot be pickled

    def rewards(
        self, correct: Tensor, confidence: Tensor, *, stage: int = 0, invalid_reward: float = -1.0
    ) -> SegmentRewards:
        right = answer_reward(correct)
        target = right if self.own_target else group_success_rate(correct)
        return self.combine(right, brier_reward(confidence, target, invalid_reward), self.stages[stage])


def _on_all_tokens(reward: Tensor) -> SegmentRewards:
    return SegmentRewards(confidence=reward, answer=reward)


METHODS: dict[str, TrainingMethod] = {
    # The paper's method: the confidence segment earns the Brier score, the answer its correctness.
    "coca": _Method(
        "coca", lambda right, brier, _: SegmentRewards(confidence=brier, answer=right), has_confidence_reward=True
    ),
    # GRPO on correctness alone; the confidence is stated but earns nothing of its own.
    "rlvr": _Method("rlvr", lambda right, brier, _: _on_all_tokens(right)),
    # The ablation without segments: the sum of CoCA's two rewards.
    "joint": _Method("joint", lambda right, brier, _: _on_all_tokens(right + brier)),
    # First correctness alone, then confidence alone: the paper's case of reward hacking.
    "sequential": _Method(
        "sequential",
        lambda right, brier, stage: _on_all_tokens(right if stage == "accuracy" else brier),
        stages=("accuracy", "confidence"),
    ),
    # Answer first (Damani et al., 2025): 1[y] - (s - 1[y])^2.
    "rlcr": _Method(
        "rlcr",
        lambda right, brier, _: _on_all_tokens(right + brier),
        ANSWER_FIRST_PROMPT,
        "last",
        own_target=True,
    ),
}


def training_method(name: str) -> TrainingMethod:
    """The method called ``name``; ``ValueError`` if there is none."""
    if name not in METHODS:
        raise ValueError(f"unknown training method {name!r}; known methods: {', '.join(METHODS)}")
    return METHODS[name]
