"""From graded responses to an advantage for each token, for all engines (paper, section 3)."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from coca_mindspeed.algorithm.advantages import centred_rewards, group_advantages, group_varies, token_advantages
from coca_mindspeed.algorithm.checks import check_tensor
from coca_mindspeed.algorithm.rewards import TrainingMethod, brier_reward, group_success_rate

AdvantageScale = Literal["group", "batch", "none"]
#: Adds up (sum of squares, count) over all processes of a step.
Reduce = Callable[[float, int], tuple[float, int]]
_LEAST_DEVIATION = 1e-8  # added to the step's deviation


class SegmentCredit(NamedTuple):
    """What ``B = P * G`` responses earned and learn, on the CPU.

    Attributes:
        gradable: bool ``[P, G]``, whether the answer could be graded.
        kept: bool ``[P]``, whether the group has the two gradable answers that a comparison needs.
        gesr: float64 ``[P, 1]``, the success rate of each group's gradable answers; NaN where it is not kept.
        confidence_reward: float64 ``[P, G]``, the Brier score against GESR, whatever the method rewards; NaN where the
            response takes no part in its group.
        confidence: float32 ``[P, G]``, advantage of each confidence segment; 0 where the response takes no part.
        answer: float32 ``[P, G]``, advantage of each answer segment, likewise.
        confidence_varies: bool ``[P]``, whether the confidence segments' rewards differ within the group at all.
        answer_varies: bool ``[P]``, likewise.
        segment_lengths: int ``[B]``, tokens of each confidence segment.
        tokens: float32 ``[B, width]``, the advantage of each token, 0 on padding.
        deviation: float64 ``[]``, the step's deviation that ``batch`` divides by; 0 with another scale.
    """

    gradable: Tensor
    kept: Tensor
    gesr: Tensor
    confidence_reward: Tensor
    confidence: Tensor
    answer: Tensor
    confidence_varies: Tensor
    answer_varies: Tensor
    segment_lengths: Tensor
    tokens: Tensor
    deviation: Tensor


@dataclass(frozen=True, slots=True)
class CreditRule:
    """How a method's rewards become advantages.

    Attributes:
        method: who earns what, and where the confidence stands.
        stage: index into the method's stages.
        invalid_reward: confidence reward of a response without a valid confidence.
        scale: divisor of a group's centred rewards: its own deviation plus eps (``group``, the paper's), one deviation
            of the centred rewards of the whole step (``batch``), or 1 (``none``).  It applies to the Brier scores of a
            method whose confidence segment has a reward of its own, and to the one reward of another method.  Answer
            and format advantages of ``coca`` always have the group's scale.
        ddof: of the groups' deviation; 1 is the sample's, 0 the population's.
        eps: added to the deviation.
        separate_format: normalise the Brier scores over the valid responses alone, and add the normalised 0/1 reward
            of being valid.  In the paper's form (False) one invalid response among eight, with its reward of -1,
            shrinks the differences among the valid ones 5 to 40 times.  Equal where all are valid; for methods whose
            confidence segment has a reward of its own (``coca``).
        entropy_bonus: added to the reward of a valid confidence is this times ``-log pi(confidence segment)``.  Its
            expectation is the entropy of the segment, which keeps the policy from stating one confidence everywhere;
            for the same methods.
    """

    method: TrainingMethod
    stage: int = 0
    invalid_reward: float = -1.0
    ddof: int = 1
    eps: float = 1e-6
    separate_format: bool = True
    entropy_bonus: float = 0.0
    scale: AdvantageScale = "group"

    def __call__(
        self,
        correct: Tensor,
        confidence: Tensor,
        confidence_lengths: Tensor,
        response_lengths: Tensor,
        width: int,
        gradable: Tensor | None = None,
        log_probs: Tensor | None = None,
        reduce: Reduce | None = None,
    ) -> SegmentCredit:
        """Give credit.

        A response whose answer could not be graded is no member of its group: GESR, rewards and advantages are those of
        the group of the others.  A group of fewer than two gradable answers is dropped.  Responses that take no part
        have the advantage 0, and so add nothing to the loss.

        Args:
            correct: bool ``[P, G]``, with G at least 2; anything where not gradable.
            confidence: float ``[P, G]``, NaN where the response is invalid.
            confidence_lengths: int ``[B]``, tokens up to the end of the stated confidence, group by group.
            response_lengths: int ``[B]``.
            width: tokens of the padded responses.
            gradable: bool ``[P, G]``; None: all are.
            log_probs: float ``[P, G]``, of each confidence segment under the policy that sampled it; for
                ``entropy_bonus``.
            reduce: adds the sum of squares and the number of centred rewards over the processes that share a step, so
                that ``batch`` has one deviation in all of them; None: this process has the whole step.

        Raises:
            ValueError: a wrong shape or dtype, or an entropy bonus without log-probs.
        """
        check_tensor("correct", correct, "bool", "prompts", "group")
        if correct.shape[1] < 2:
            raise ValueError(f"correct should have at least 2 responses in a group, found {list(correct.shape)}")
        gradable = torch.ones_like(correct) if gradable is None else gradable
        check_tensor("confidence", confidence, "float", *correct.shape)
        check_tensor("gradable", gradable, "bool", *correct.shape)
        if self.entropy_bonus and (log_probs is None or log_probs.shape != correct.shape):
            raise ValueError(f"entropy_bonus={self.entropy_bonus} needs log_probs, float {list(correct.shape)}")
        sizes = gradable.sum(dim=1)
        confidence_reward = torch.full_like(correct, torch.nan, dtype=torch.float64)
        gesr = torch.full_like(sizes[:, None], torch.nan, dtype=torch.float64)
        earned, earned_by_answer = (torch.zeros_like(correct, dtype=torch.float64) for _ in range(2))
        for size in sizes.unique().tolist():
            if size < 2:
                continue
            groups = sizes == size
            members = gradable & groups[:, None]
            right, stated = correct[members].view(-1, size), confidence[members].view(-1, size)
            rewards = self.method.rewards(right, stated, stage=self.stage, invalid_reward=self.invalid_reward)
            rate = group_success_rate(right)
            gesr[groups] = rate
            confidence_reward[members] = brier_reward(stated, rate, self.invalid_reward).flatten()
            earned[members] = rewards.confidence.flatten()
            earned_by_answer[members] = rewards.answer.flatten()
        own_reward = self.method.has_confidence_reward
        kept = sizes >= 2
        members = gradable & kept[:, None]
        valid = members & ~confidence.isnan()
        if own_reward and self.entropy_bonus and log_probs is not None:
            earned = torch.where(valid, earned - self.entropy_bonus * log_probs.to(torch.float64), earned)
        if own_reward and self.separate_format:
            of_brier, brier_varies, deviation = self._scaled(earned, valid, reduce)
            of_format, format_varies = self._group_scaled(valid.to(torch.float64), members)
            of_confidence, confidence_varies = of_brier + of_format, brier_varies | format_varies
        else:
            of_confidence, confidence_varies, deviation = self._scaled(earned, members, reduce)
        of_answer, answer_varies = of_confidence, confidence_varies
        if own_reward:
            of_answer, answer_varies = self._group_scaled(earned_by_answer, members)
        segment = self.segment_lengths(confidence_lengths)
        return SegmentCredit(
            gradable=gradable,
            kept=kept,
            gesr=gesr,
            confidence_reward=confidence_reward,
            confidence=of_confidence,
            answer=of_answer,
            confidence_varies=confidence_varies,
            answer_varies=answer_varies,
            segment_lengths=segment,
            tokens=token_advantages(of_confidence.flatten(), of_answer.flatten(), segment, response_lengths, width),
            deviation=torch.tensor(deviation, dtype=torch.float64),
        )

    def _scaled(self, rewards: Tensor, members: Tensor, reduce: Reduce | None) -> tuple[Tensor, Tensor, float]:
        """Advantages at :attr:`scale`, which groups vary, and the step's deviation (0 if it is not used)."""
        if self.scale == "group":
            return *self._group_scaled(rewards, members), 0.0
        centred, varies = _by_group(rewards, members, centred_rewards)
        if self.scale == "none":
            return centred.to(torch.float32), varies, 0.0
        # fsum does not depend on the order of the groups.
        squares, count = math.fsum(centred[members].square().tolist()), int(members.sum())
        if reduce is not None:
            squares, count = reduce(squares, count)
        deviation = math.sqrt(squares / max(1, count)) + _LEAST_DEVIATION
        return (centred / deviation).to(torch.float32), varies, deviation

    def _group_scaled(self, rewards: Tensor, members: Tensor) -> tuple[Tensor, Tensor]:
        """Advantages at the groups' own scale, and which groups vary."""
        advantages, varies = _by_group(rewards, members, partial(group_advantages, ddof=self.ddof, eps=self.eps))
        return advantages.to(torch.float32), varies

    def segment_lengths(self, confidence_lengths: Tensor) -> Tensor:
        """Tokens of each confidence *segment*, from the tokens up to the end of each stated confidence, int ``[B]``.

        An answer-first response has no confidence segment: its method has one reward, which falls on every token.
        """
        first = self.method.confidence_position == "first"
        return confidence_lengths if first else torch.zeros_like(confidence_lengths)


def _by_group(rewards: Tensor, members: Tensor, of: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """``of`` the members' rewards of each group, float64 ``[P, G]``, and which groups vary, bool ``[P]``.

    0 for the others, and in a group of fewer than two members.
    """
    result = torch.zeros_like(rewards)
    sizes = members.sum(dim=1)
    varies = torch.zeros_like(sizes, dtype=torch.bool)
    for size in sizes.unique().tolist():
        if size >= 2:
            groups = sizes == size
            compared = members & groups[:, None]
            of_members = rewards[compared].view(-1, size)
            result[compared] = of(of_members).to(torch.float64).flatten()
            varies[groups] = group_varies(of_members)
    return result, varies
