"""One rollout: P prompts with G responses each, from the sampled tokens to the advantage of each token."""

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from coca_mindspeed.algorithm import check_tensor
from coca_mindspeed.algorithm.advantages import Reduce, SegmentMasks, segment_masks, token_advantages
from coca_mindspeed.algorithm.boundary import TokenText, confidence_segment_lengths, segment_ends
from coca_mindspeed.algorithm.credit import NO_CREDIT, Credit, CreditRule, stated_decimals
from coca_mindspeed.algorithm.parsing import ResponseParser
from coca_mindspeed.data.records import Record
from coca_mindspeed.grading.unevaluated import reject_unevaluated
from coca_mindspeed.grading.verdict import Grader, Verdict

#: Columns of scored responses, ``[B, k]`` each: a stage that scores writes them, a stage that gives credit reads them.
#: NaN: the response states no valid confidence, or its answer could not be graded.
SCORE_COLUMNS: dict[str, torch.dtype] = {
    "stated_confidence": torch.float64,  # the first and, where the method asks for it, the second confidence
    "correct": torch.float64,  # 1 or 0
    "confidence_length": torch.int64,  # tokens up to the end of the stated confidence
    "segment_ends": torch.int64,  # tokens up to the end of each of the S segments
}


_EMPTY = torch.empty(0)


@dataclass(kw_only=True)
class Rollout:
    """``B`` responses on the CPU, group by group: the G responses to a prompt are neighbours.

    Each stage fills its fields, in this order; before it they are empty or None.

    Attributes:
        lengths: int64 ``[B]``, tokens of each response.
        width: tokens of the longest response, T.
        records: the question of each response.
        prompts: token ids of each response's prompt.
        token_ids: int64 ``[B, T]``, anything behind a response's end.
        log_probs: float32 ``[B, T]`` of the sampled tokens under the policy that sampled them.
        finished: bool ``[B]``; False if the length limit cut the response off.
        entropy: float32 ``[B]``, nats, mean over the response's tokens.
        texts: the decoded responses.
        answers: the answer segment of each; of a response without a valid confidence, the whole text.
        stated: float64 ``[B]``, the stated confidences; NaN where a response states no valid one.
        stated_after: float64 ``[B]``, the second confidences of a method that asks for two; None for the others.
        confidence_lengths: int64 ``[B]``, tokens up to the end of the stated confidence.
        segment_ends: int64 ``[B, S]``, tokens up to the end of each segment; the last are the responses' lengths.
        verdicts: on each answer.
        correct: float64 ``[B]``, 1 or 0; NaN where the answer could not be graded.
        grading_seconds: wall time of grading.
        unevaluated: number of right answers that training does not reward, because they only restate the question.
        credit: rewards and advantages of each segment, by group.
        token_advantages: float32 ``[B, T]``, 0 behind a response's end.
    """

    lengths: Tensor
    width: int
    records: Sequence[Record] = ()
    prompts: Sequence[Sequence[int]] = ()
    token_ids: Tensor | None = None
    log_probs: Tensor | None = None
    finished: Tensor | None = None
    entropy: Tensor | None = None

    texts: Sequence[str] = ()
    answers: Sequence[str] = ()
    stated: Tensor = _EMPTY
    stated_after: Tensor | None = None
    confidence_lengths: Tensor = _EMPTY
    segment_ends: Tensor = _EMPTY

    verdicts: Sequence[Verdict] = ()
    correct: Tensor = _EMPTY
    grading_seconds: float = 0.0
    unevaluated: int = 0

    credit: Credit = NO_CREDIT
    token_advantages: Tensor = _EMPTY

    @classmethod
    def from_scores(
        cls,
        columns: Mapping[str, Tensor],
        *,
        width: int | None = None,
        texts: Sequence[str] = (),
        verdicts: Sequence[Verdict] = (),
    ) -> "Rollout":
        """Inverse of :meth:`scores`; casts the columns to :data:`SCORE_COLUMNS`.  ``width`` None: the longest response.

        Raises:
            ValueError: a wrong shape or dtype.
        """
        first, *after = stated_decimals(columns["stated_confidence"]).T.contiguous()
        of_type = {name: columns[name].to(dtype) for name, dtype in SCORE_COLUMNS.items()}
        lengths = of_type["segment_ends"][:, -1].contiguous()
        return cls(
            lengths=lengths,
            width=int(lengths.max()) if width is None else width,
            stated=first,
            stated_after=after[0] if after else None,
            confidence_lengths=of_type["confidence_length"].flatten(),
            segment_ends=of_type["segment_ends"],
            texts=texts,
        ).set_correct(of_type["correct"].flatten(), verdicts)

    def read(self, text: TokenText, parser: ResponseParser, max_confidence_tokens: int) -> "Rollout":
        """Decode the responses, parse their confidences and find the ends of their segments."""
        assert self.token_ids is not None
        self.texts = text.decode(self.token_ids, self.lengths)
        parsed = [parser(response) for response in self.texts]
        self.answers = [p.answer for p in parsed]
        self.stated = confidences(p.confidence for p in parsed)
        if parser.position == "both":
            self.stated_after = confidences(p.confidence_after for p in parsed)
        valid = [~stated.isnan() for stated in (self.stated, self.stated_after) if stated is not None]
        given = (self.token_ids, self.lengths, text)
        options: Any = {"max_confidence_tokens": max_confidence_tokens, "position": parser.position}
        self.segment_ends = segment_ends(*given, valid, **options)
        self.confidence_lengths = confidence_segment_lengths(*given, valid[0], **options)
        return self

    def grade(self, grader: Grader) -> "Rollout":
        """Grade the answers."""
        started = time.perf_counter()
        verdicts = grader.grade(self.records, self.answers)
        self.grading_seconds = time.perf_counter() - started
        return self.set_correct(correctness(verdicts), verdicts)

    def reject_unevaluated(self) -> "Rollout":
        """Let no answer that only restates its question be right, as training requires it."""
        verdicts = reject_unevaluated(self.records, self.answers, self.verdicts)
        self.unevaluated = sum(old.correct != new.correct for old, new in zip(self.verdicts, verdicts, strict=True))
        return self.set_correct(correctness(verdicts), verdicts)

    def set_correct(self, correct: Tensor, verdicts: Sequence[Verdict] = ()) -> "Rollout":
        """Set the verdicts on the answers; ``correct`` is float ``[B]``: 1, 0, or NaN where ungradable."""
        check_tensor("correct", correct, "float", len(self.lengths))
        self.correct, self.verdicts = correct.double(), verdicts
        return self

    def scores(self) -> dict[str, Tensor]:
        """The results of scoring as the columns of :data:`SCORE_COLUMNS`."""
        stated = [self.stated] if self.stated_after is None else [self.stated, self.stated_after]
        return {
            "stated_confidence": torch.stack(stated, dim=1),
            "correct": self.correct[:, None],
            "confidence_length": self.confidence_lengths[:, None],
            "segment_ends": self.segment_ends,
        }

    def give_credit(
        self, rule: CreditRule, group_size: int, reduce: Reduce | None = None, *, log_probs: Tensor | None = None
    ) -> "Rollout":
        """Compute rewards, advantages and the advantage of each token, in groups of ``group_size`` (G) responses.

        See :class:`CreditRule`; ``log_probs``, float64 ``[B]``, are those of :func:`confidence_log_probs`.

        Raises:
            ValueError: a wrong shape or dtype, or a rollout without scores or of groups that are not whole.
        """
        if not len(self.stated) == len(self.correct) == len(self.lengths) or len(self.lengths) % group_size:
            raise ValueError(
                f"credit needs a confidence and a verdict for each response of whole groups of {group_size}; found "
                f"{len(self.stated)} and {len(self.correct)} of {len(self.lengths)} responses"
            )

        def grouped(values: Tensor) -> Tensor:
            return values.view(-1, group_size)

        of_confidence, after = (None if each is None else grouped(each) for each in (log_probs, self.stated_after))
        self.credit = rule(grouped(self.correct), grouped(self.stated), of_confidence, reduce, after)
        advantages = [values.flatten() for values in self.credit.values_by_segment().values()]
        self.token_advantages = token_advantages(advantages, self.segment_ends, self.width)
        return self

    @property
    def given_credit(self) -> Credit:
        """:attr:`credit`; raises ValueError before :meth:`give_credit`."""
        if self.credit is NO_CREDIT:
            raise ValueError(f"a rollout of {len(self.lengths)} responses has no credit yet; call give_credit first")
        return self.credit

    @property
    def masks(self) -> SegmentMasks:
        """Tokens of each segment, bool ``[B, T]`` each; raises ValueError before :meth:`give_credit`."""
        return segment_masks(self.segment_ends, list(self.given_credit.segments), self.width)

    def rows(self, shown: Iterable[int]) -> list[dict[str, Any]]:
        """Rows of a samples dump of the responses ``shown``; the reward of one that takes no part is None.

        Raises ValueError before :meth:`give_credit`.
        """
        credit, group_size = self.given_credit, self.given_credit.group_size
        advantages = {name: values.flatten() for name, values in credit.values_by_segment().items()}
        return [
            {
                **self.scored_row(row),
                "gesr": number_or_none(credit.gesr[row // group_size]),
                "confidence_reward": number_or_none(credit.confidence_reward.flatten()[row]),
                **{f"{name}_advantage": float(values[row]) for name, values in advantages.items()},
                "tokens": int(self.lengths[row]),
                "confidence_tokens": int(self.confidence_lengths[row]),
            }
            for row in shown
        ]

    def scored_row(self, row: int) -> dict[str, Any]:
        """Text and verdict where they are known, confidence and correctness; None if it is invalid or ungradable."""
        known: dict[str, Any] = {}
        if self.verdicts:
            verdict = self.verdicts[row]
            known = {"response": self.texts[row], "verdict": verdict.outcome.value, "reason": verdict.reason}
        known["confidence"] = number_or_none(self.stated[row])
        if self.stated_after is not None:
            known["confidence_after"] = number_or_none(self.stated_after[row])
        return {**known, "correct": None if bool(self.correct[row].isnan()) else bool(self.correct[row])}


def confidence_log_probs(rule: CreditRule, log_probs: Tensor | None, ends: Tensor) -> Tensor | None:
    """Sum the log-probs of each confidence segment's tokens, for the entropy bonus of ``rule``.

    The policy of the log-probs is the one whose entropy the bonus raises: the one that sampled the responses, or, where
    the loss weights each token for the weights that sampled it, the one that is updated.

    Args:
        rule: with the names of the segments.
        log_probs: float ``[B, T]`` of the sampled tokens, anything behind a response's end; None: unknown.
        ends: int ``[B, S]``, tokens up to the end of each segment, on the same device.

    Returns:
        float64 ``[B]``; None without a bonus, or if the log-probs are unknown.

    Raises:
        ValueError: a response is longer than T.
    """
    if not rule.entropy_bonus or log_probs is None:
        return None
    inside = segment_masks(ends, rule.segments, log_probs.shape[1])["confidence"]
    return log_probs.double().where(inside, 0.0).sum(dim=1)


def correctness(verdicts: Iterable[Verdict]) -> Tensor:
    """1 for right, 0 for wrong and NaN for ungradable answers, float64 ``[n]``."""
    known = (verdict.correct_or_none for verdict in verdicts)
    return torch.tensor([math.nan if correct is None else float(correct) for correct in known], dtype=torch.float64)


def confidences(stated: Iterable[float | None]) -> Tensor:
    """Stated confidences as float64 ``[n]``, NaN for None."""
    return torch.tensor([math.nan if value is None else value for value in stated], dtype=torch.float64)


def number_or_none(value: Tensor) -> float | None:
    """The number of a tensor ``[]``; None for NaN."""
    return None if bool(value.isnan()) else float(value)
