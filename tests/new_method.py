"""A training method as somebody would add one: one class, and one line of YAML that names it."""

from dataclasses import dataclass

import torch
from torch import Tensor

from coca_mindspeed.algorithm.parsing import CONFIDENCE_FIRST_PROMPT, ConfidencePosition
from coca_mindspeed.algorithm.rewards import SegmentRewards


@dataclass(frozen=True)
class Doubt:
    """Rewards nothing but low confidence."""

    name: str = "doubt"
    system_prompt: str = CONFIDENCE_FIRST_PROMPT
    confidence_position: ConfidencePosition = "first"
    stages: tuple[str, ...] = ("train",)
    has_confidence_reward: bool = True

    def rewards(
        self, correct: Tensor, confidence: Tensor, *, stage: int = 0, invalid_reward: float = -1.0
    ) -> SegmentRewards:
        doubt = torch.where(confidence.isnan(), invalid_reward, -confidence.to(torch.float64))
        return SegmentRewards(confidence=doubt, answer=torch.zeros_like(doubt))
