"""The forms of a rollout of P prompts with G responses each, from the sampled tokens to the advantage of each token.

:class:`Sampled` is read into :class:`Parsed`; verdicts make it :class:`Scored`, or :class:`Graded` where the texts are
known; a :class:`CreditRule` makes that :class:`Credited`.  All tensors are on the CPU, and ``B`` responses stand group
by group: the G responses to a prompt are neighbours.
"""

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from coca_mindspeed.algorithm import check_tensor
from coca_mindspeed.algorithm.advantages import Reduce, SegmentMasks, segment_masks, token_advantages
from coca_mindspeed.algorithm.boundary import TokenText, confidence_segment_lengths, segment_ends, thought_ends
from coca_mindspeed.algorithm.credit import Credit, CreditRule
from coca_mindspeed.algorithm.methods import MethodSettings
from coca_mindspeed.algorithm.parsing import END_THINK_TAG
from coca_mindspeed.data.records import Record
from coca_mindspeed.grading.unevaluated import reject_unevaluated
from coca_mindspeed.grading.verdict import Grader, Verdict

#: Columns of :class:`Scored`, ``[B, k]`` each: the scorer writes them, the credit reads them.
#: NaN: the response states no valid confidence, or its answer could not be graded.
SCORE_COLUMNS: dict[str, torch.dtype] = {
    "stated_confidence": torch.float64,  # the first and, where the method asks for it, the second confidence
    "correct": torch.float64,  # 1 or 0
    "confidence_length": torch.int64,  # tokens up to the end of the confidence and, with thinking, of the thought
    "segment_ends": torch.int64,  # tokens up to the end of each of the S segments
}


@dataclass(frozen=True, kw_only=True)
class Sampled:
    """Sampled responses.

    Attributes:
        token_ids: int64 ``[B, T]``, anything behind a response's end.
        lengths: int64 ``[B]``, tokens of each response.
    """

    token_ids: Tensor
    lengths: Tensor

    @classmethod
    def of_responses(cls, responses: Iterable[Sequence[int] | Tensor]) -> "Sampled":
        """Pad the token ids of responses, each without padding."""
        ids = [torch.as_tensor(response, dtype=torch.int64, device="cpu") for response in responses]
        return cls(token_ids=pad_sequence(ids, batch_first=True), lengths=torch.tensor([len(each) for each in ids]))

    def read(self, text: TokenText, method: MethodSettings, *, in_training: bool = True) -> "Parsed":
        """Decode the responses, parse their confidences and find the ends of their segments."""
        parser, texts = method.parser(in_training=in_training), text.decode(self.token_ids, self.lengths)
        parsed = [parser(response) for response in texts]
        stated = confidences(p.confidence for p in parsed)
        after = confidences(p.confidence_after for p in parsed) if parser.position == "both" else None
        valid = [~each.isnan() for each in (stated, after) if each is not None]
        closed = torch.tensor([END_THINK_TAG in response for response in texts], dtype=torch.bool)
        given = (self.token_ids, self.lengths, text)
        options: Any = {"max_confidence_tokens": method.max_confidence_tokens, "position": parser.position}
        return Parsed(
            texts=texts,
            answers=[p.answer for p in parsed],
            stated=stated,
            stated_after=after,
            confidence_lengths=confidence_segment_lengths(*given, valid[0], **options),
            segment_ends=segment_ends(*given, valid, **options),
            thought_ends=thought_ends(*given, closed) if parser.thinking else None,
        )


@dataclass(frozen=True, kw_only=True)
class Stated:
    """The confidences of responses, and where their segments end.

    Attributes:
        stated: float64 ``[B]``, the stated confidences; NaN where a response states no valid one.
        stated_after: float64 ``[B]``, the second confidences of a method that asks for two; None for the others.
        confidence_lengths: int64 ``[B]``, tokens up to the end of the stated confidence.
        segment_ends: int64 ``[B, S]``, tokens up to the end of each segment; the last are the responses' lengths.
        thought_ends: int64 ``[B]``, tokens up to the end of the thought, 0 if it does not end; None without thinking.
    """

    stated: Tensor
    stated_after: Tensor | None
    confidence_lengths: Tensor
    segment_ends: Tensor
    thought_ends: Tensor | None = None

    @property
    def lengths(self) -> Tensor:
        """Tokens of each response, int64 ``[B]``."""
        return self.segment_ends[:, -1]


@dataclass(frozen=True, kw_only=True)
class Parsed(Stated):
    """Responses that are read, and not graded.

    Attributes:
        texts: the decoded responses.
        answers: the answer of each, as :class:`.ParsedResponse` has it.
    """

    texts: Sequence[str]
    answers: Sequence[str]

    def scored(self, correct: Tensor) -> "Scored":
        """Add verdicts, float64 ``[B]``: 1, 0, or NaN where ungradable; raises ValueError for another shape or kind."""
        return Scored(
            stated=self.stated,
            stated_after=self.stated_after,
            confidence_lengths=self.confidence_lengths,
            segment_ends=self.segment_ends,
            thought_ends=self.thought_ends,
            correct=correct,
        )

    def graded(self, records: Sequence[Record], grader: Grader) -> "Graded":
        """Grade the answers to the questions of ``records``, one for each response."""
        started = time.perf_counter()
        verdicts = grader.grade(records, self.answers)
        seconds = time.perf_counter() - started
        known = {**vars(self), "records": records, "verdicts": verdicts, "correct": correctness(verdicts)}
        return Graded(**known, grading_seconds=seconds)


@dataclass(frozen=True, kw_only=True)
class Scored(Stated):
    """Responses with verdicts, without texts: what engines send from one process to another.

    Attributes:
        correct: float64 ``[B]``, 1 or 0; NaN where the answer could not be graded.
    """

    correct: Tensor

    def __post_init__(self) -> None:
        check_tensor("correct", self.correct, "float", len(self.segment_ends))

    @classmethod
    def from_columns(cls, columns: Mapping[str, Tensor]) -> "Scored":
        """Inverse of :meth:`columns`; casts the columns to :data:`SCORE_COLUMNS`.

        Raises ValueError: a wrong shape.
        """
        of_type = {name: columns[name].to(dtype) for name, dtype in SCORE_COLUMNS.items()}
        first, *after = of_type["stated_confidence"].T.contiguous()
        confidence_length, *thought = of_type["confidence_length"].T.contiguous()
        return Scored(
            stated=first,
            stated_after=after[0] if after else None,
            confidence_lengths=confidence_length,
            thought_ends=thought[0] if thought else None,
            segment_ends=of_type["segment_ends"],
            correct=of_type["correct"].flatten(),
        )

    @staticmethod
    def joined(parts: Sequence["Scored"]) -> "Scored":
        """The responses of all parts, at least one, in their order."""
        columns = [part.columns() for part in parts]
        return Scored.from_columns({name: torch.cat([each[name] for each in columns]) for name in SCORE_COLUMNS})

    def columns(self) -> dict[str, Tensor]:
        """The columns of :data:`SCORE_COLUMNS`."""
        stated = [each for each in (self.stated, self.stated_after) if each is not None]
        lengths = [each for each in (self.confidence_lengths, self.thought_ends) if each is not None]
        return {
            "stated_confidence": torch.stack(stated, dim=1),
            "correct": self.correct[:, None],
            "confidence_length": torch.stack(lengths, dim=1),
            "segment_ends": self.segment_ends,
        }

    def give_credit(
        self,
        rule: CreditRule,
        group_size: int,
        reduce: Reduce | None = None,
        *,
        log_probs: Tensor | None = None,
        width: int | None = None,
    ) -> "Credited":
        """Compute rewards, advantages and the advantage of each token, in groups of ``group_size`` (G) responses.

        See :class:`CreditRule`; ``log_probs``, float64 ``[B]``, are those of :func:`confidence_log_probs`.  ``width``
        (T) is the number of columns of the token advantages; None: the tokens of the longest response.

        Raises ValueError: a wrong shape or dtype, groups that are not whole, or a response longer than ``width``.
        """
        if len(self.correct) % group_size:
            raise ValueError(f"expected whole groups of {group_size} responses, found {len(self.correct)} responses")

        def grouped(values: Tensor) -> Tensor:
            return values.view(-1, group_size)

        of_confidence_PG, after_PG = (
            None if each is None else grouped(each) for each in (log_probs, self.stated_after)
        )
        credit = rule(grouped(self.correct), grouped(self.stated), of_confidence_PG, reduce, after_PG)
        advantages_B = [values.flatten() for values in credit.values_by_segment().values()]
        columns = int(self.lengths.max()) if width is None else width
        return Credited(
            scored=self,
            credit=credit,
            token_advantages=token_advantages(advantages_B, self.segment_ends, columns),
        )

    def row(self, index: int) -> dict[str, Any]:
        """One response in a samples dump: confidence and correctness, None if it is invalid or ungradable."""
        row = {"confidence": number_or_none(self.stated[index])}
        if self.stated_after is not None:
            row["confidence_after"] = number_or_none(self.stated_after[index])
        return {**row, "correct": None if bool(self.correct[index].isnan()) else bool(self.correct[index])}


@dataclass(frozen=True, kw_only=True)
class Graded(Scored, Parsed):
    """Responses whose answers are graded where their texts are known.

    Attributes:
        records: the question of each response.
        verdicts: on each answer.
        grading_seconds: wall time of grading.
        unevaluated: number of right answers that training does not reward, because they only restate the question.
    """

    records: Sequence[Record]
    verdicts: Sequence[Verdict]
    grading_seconds: float
    unevaluated: int = 0

    def reject_unevaluated(self) -> "Graded":
        """Let no answer that only restates its question be right, as training requires it."""
        verdicts = reject_unevaluated(self.records, self.answers, self.verdicts)
        unevaluated = sum(old.correct != new.correct for old, new in zip(self.verdicts, verdicts, strict=True))
        return replace(self, verdicts=verdicts, correct=correctness(verdicts), unevaluated=unevaluated)

    def row(self, index: int) -> dict[str, Any]:
        """One response in a samples dump: question, text and verdict before the numbers."""
        record, verdict = self.records[index], self.verdicts[index]
        return {
            "id": record.id,
            "question": record.question,
            "gold": record.answer,
            "response": self.texts[index],
            "verdict": verdict.outcome.value,
            "reason": verdict.reason,
            **super().row(index),
        }


@dataclass(frozen=True, kw_only=True)
class Credited:
    """Scored responses with their advantages.

    Attributes:
        credit: rewards and advantages of each segment, by group.
        token_advantages: float32 ``[B, T]``, 0 behind a response's end.
    """

    scored: Scored
    credit: Credit
    token_advantages: Tensor

    @property
    def masks(self) -> SegmentMasks:
        """Tokens of each segment, bool ``[B, T]`` each."""
        return segment_masks(self.scored.segment_ends, list(self.credit.segments), self.token_advantages.shape[1])

    def rows(self, shown: Iterable[int]) -> list[dict[str, Any]]:
        """Rows of a samples dump of the responses ``shown``; the reward of one that takes no part is None."""
        scored, credit = self.scored, self.credit
        advantages = {name: values.flatten() for name, values in credit.values_by_segment().items()}
        return [
            {
                **scored.row(row),
                "gesr": number_or_none(credit.gesr[row // credit.group_size]),
                "confidence_reward": number_or_none(credit.confidence_reward.flatten()[row]),
                **{f"{name}_advantage": float(values[row]) for name, values in advantages.items()},
                "tokens": int(scored.lengths[row]),
                "confidence_tokens": int(scored.confidence_lengths[row]),
            }
            for row in shown
        ]


def confidence_log_probs(rule: CreditRule, log_probs: Tensor | None, ends: Tensor) -> Tensor | None:
    """Sum the log-probs of each confidence segment's tokens, if the settings of ``rule`` read them.

    The policy of the log-probs is the one whose entropy a bonus raises: the one that sampled the responses, or, where
    the loss weights each token for the weights that sampled it, the one that is updated.

    Args:
        rule: with the names of the segments.
        log_probs: float ``[B, T]`` of the sampled tokens, anything behind a response's end; None: unknown.
        ends: int ``[B, S]``, tokens up to the end of each segment, on the same device.

    Returns:
        float64 ``[B]``; None if the settings read none, or the log-probs are unknown.

    Raises ValueError: a response is longer than T.
    """
    if not rule.settings.reads_log_probs or log_probs is None:
        return None
    inside_BT = segment_masks(ends, rule.segments, log_probs.shape[1])["confidence"]
    return log_probs.double().where(inside_BT, 0.0).sum(dim=1)


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
