"""A scored batch: P prompts with G responses each, their rewards and advantages, metrics and sample rows."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from coca_mindspeed.algorithm.advantages import SegmentMasks, per_token_of_segment, segment_masks
from coca_mindspeed.algorithm.credit import CreditRule, Reduce, SegmentCredit
from coca_mindspeed.algorithm.parsing import as_stated
from coca_mindspeed.grading.verdict import Verdict
from coca_mindspeed.scoring.metrics import Mean, batch_metrics, values


@dataclass(frozen=True, slots=True)
class ScoredBatch:
    """``B = P * G`` scored responses, group by group, on the CPU.

    Attributes:
        correct: bool ``[P, G]``, undefined where ``credit.gradable`` is False.
        confidence: float ``[P, G]``, NaN where the response is invalid.
        confidence_lengths: int ``[B]``, tokens up to the end of the stated confidence.
        response_lengths: int ``[B]``.
        credit: rewards and advantages.
        texts: decoded responses; empty in a process that has none.
        verdicts: of the grader; empty likewise.
    """

    correct: Tensor
    confidence: Tensor
    confidence_lengths: Tensor
    response_lengths: Tensor
    credit: SegmentCredit
    texts: Sequence[str] = ()
    verdicts: Sequence[Verdict] = ()

    @classmethod
    def of(
        cls,
        rule: CreditRule,
        *,
        group_size: int,
        correct: Tensor,
        gradable: Tensor | None,
        confidence: Tensor,
        confidence_lengths: Tensor,
        response_lengths: Tensor,
        width: int,
        log_probs: Tensor | None = None,
        reduce: Reduce | None = None,
        texts: Sequence[str] = (),
        verdicts: Sequence[Verdict] = (),
    ) -> "ScoredBatch":
        """Compute the credit of ``B`` responses. All tensors are ``[B]``, except ``log_probs``; see the attributes.

        Args:
            group_size: G.
            gradable: bool; None: all are.
            width: tokens of the padded responses.
            log_probs: float ``[B, width]`` of the sampled tokens, if known; ``entropy_bonus`` needs them.
            reduce: see :class:`CreditRule`.

        Raises:
            ValueError: a wrong shape or dtype.
        """
        correct, confidence = correct.view(-1, group_size), confidence.view(-1, group_size)
        gradable = None if gradable is None else gradable.view(-1, group_size)
        if log_probs is not None:
            inside = torch.arange(width) < rule.segment_lengths(confidence_lengths)[:, None]
            log_probs = torch.where(inside, log_probs, 0.0).sum(dim=1).view(-1, group_size)
        credit = rule(correct, confidence, confidence_lengths, response_lengths, width, gradable, log_probs, reduce)
        return cls(correct, confidence, confidence_lengths, response_lengths, credit, texts, verdicts)

    @property
    def masks(self) -> SegmentMasks:
        """Tokens of each segment, bool ``[B, width]`` each."""
        return segment_masks(self.credit.segment_lengths, self.response_lengths, self.credit.tokens.shape[1])

    def columns(self, *, segment_mean: bool = False) -> dict[str, Tensor]:
        """The columns that an update reads: ``advantages`` and ``segment_length``.

        Args:
            segment_mean: divide each token's advantage by the length of its segment, so that an objective that sums
                over tokens averages over each segment.

        Returns:
            float32 ``[B, width]``, 0 on padding, and int ``[B]``, tokens of each confidence segment.
        """
        tokens = self.credit.tokens
        return {
            "advantages": per_token_of_segment(tokens, self.masks) if segment_mean else tokens,
            "segment_length": self.credit.segment_lengths,
        }

    def means(self) -> dict[str, Mean]:
        """Metrics with their weights, so that several batches can be averaged."""
        return batch_metrics(self.correct, self.confidence, self.response_lengths, self.credit)

    def metrics(self) -> dict[str, float]:
        """Metrics by the names of docs/training.md, NaN where undefined."""
        return values(self.means())

    def rows(self, shown: Iterable[int]) -> list[dict[str, Any]]:
        """Rows of a samples dump: response and verdict where they are known, then the numbers.

        None stands for the confidence of an invalid response, for ``correct`` of an ungradable answer, and for the
        reward of a response that is left out of its group.

        Args:
            shown: indexes into the batch.
        """
        group, credit, stated = self.correct.shape[1], self.credit, self.confidence.flatten()
        return [
            {
                **self._graded(row),
                "confidence": None if bool(stated[row].isnan()) else as_stated(float(stated[row])),
                "correct": bool(self.correct.flatten()[row]) if bool(credit.gradable.flatten()[row]) else None,
                "gesr": _number(credit.gesr[row // group]),
                "confidence_reward": _number(credit.confidence_reward.flatten()[row]),
                "confidence_advantage": float(credit.confidence.flatten()[row]),
                "answer_advantage": float(credit.answer.flatten()[row]),
                "tokens": int(self.response_lengths[row]),
                "confidence_tokens": int(self.confidence_lengths[row]),
            }
            for row in shown
        ]

    def _graded(self, row: int) -> dict[str, str]:
        if not self.verdicts:
            return {}
        verdict = self.verdicts[row]
        return {"response": self.texts[row], "verdict": verdict.outcome.value, "reason": verdict.reason}


def _number(value: Tensor) -> float | None:
    return None if bool(value.isnan()) else float(value)
