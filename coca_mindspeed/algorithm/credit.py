"""From judged responses to an advantage for each token: the one road that every engine takes (paper, section 3)."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from coca_mindspeed.algorithm.advantages import group_advantages, group_varies, token_advantages
from coca_mindspeed.algorithm.rewards import TrainingMethod, brier_reward, group_success_rate


class SegmentCredit(NamedTuple):
    """What ``B = P * G`` responses earned and learn, on the CPU.

    Attributes:
        gesr: float64 ``[P, 1]``, the success rate of each group.
        confidence_reward: float64 ``[P, G]``, the Brier score against GESR, whatever the method rewards.
        confidence: float32 ``[P, G]``, advantage of each confidence segment.
        answer: float32 ``[P, G]``, advantage of each answer segment.
        confidence_varies: bool ``[P]``, whether the confidence segments' rewards differ within the group at all.
        answer_varies: bool ``[P]``, likewise.
        segment_lengths: int ``[B]``, tokens of each confidence segment.
        tokens: float32 ``[B, width]``, the advantage of each token, 0 on padding.
    """

    gesr: Tensor
    confidence_reward: Tensor
    confidence: Tensor
    answer: Tensor
    confidence_varies: Tensor
    answer_varies: Tensor
    segment_lengths: Tensor
    tokens: Tensor


@dataclass(frozen=True, slots=True)
class CreditRule:
    """How a method's rewards become advantages.

    Attributes:
        method: who earns what, and where the confidence stands.
        stage: index into the method's stages.
        invalid_reward: confidence reward of a response without a valid confidence.
        ddof: of the groups' deviation; 1 is the sample's, 0 the population's.
        eps: added to the deviation.
    """

    method: TrainingMethod
    stage: int = 0
    invalid_reward: float = -1.0
    ddof: int = 1
    eps: float = 1e-6

    def __call__(
        self, correct: Tensor, confidence: Tensor, confidence_lengths: Tensor, response_lengths: Tensor, width: int
    ) -> SegmentCredit:
        """Give credit.

        Args:
            correct: bool ``[P, G]``.
            confidence: float ``[P, G]``, NaN where the response is invalid.
            confidence_lengths: int ``[B]``, tokens up to the end of the stated confidence, group by group.
            response_lengths: int ``[B]``.
            width: tokens of the padded responses.
        """
        rewards = self.method.rewards(correct, confidence, stage=self.stage, invalid_reward=self.invalid_reward)
        of_confidence, of_answer = (group_advantages(reward, ddof=self.ddof, eps=self.eps) for reward in rewards)
        segment = self.segment_lengths(confidence_lengths)
        gesr = group_success_rate(correct)
        return SegmentCredit(
            gesr=gesr,
            confidence_reward=brier_reward(confidence, gesr, self.invalid_reward),
            confidence=of_confidence,
            answer=of_answer,
            confidence_varies=group_varies(rewards.confidence),
            answer_varies=group_varies(rewards.answer),
            segment_lengths=segment,
            tokens=token_advantages(of_confidence.flatten(), of_answer.flatten(), segment, response_lengths, width),
        )

    def segment_lengths(self, confidence_lengths: Tensor) -> Tensor:
        """Tokens of each confidence *segment*, from the tokens up to the end of each stated confidence, int ``[B]``.

        An answer-first response has no confidence segment: its method has one reward, which falls on every token.
        """
        first = self.method.confidence_position == "first"
        return confidence_lengths if first else torch.zeros_like(confidence_lengths)
