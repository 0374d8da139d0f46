"""One rollout: P prompts with G responses each, from the sampled tokens to the advantage of each token."""

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from coca_mindspeed.algorithm.advantages import Reduce, SegmentMasks, segment_masks, token_advantages
from coca_mindspeed.algorithm.boundary import TokenText, confidence_segment_lengths, segment_ends
from coca_mindspeed.algorithm.credit import Credit, CreditRule, stated_decimals
from coca_mindspeed.algorithm.parsing import ResponseParser, as_stated
from coca_mindspeed.data.records import Record
from coca_mindspeed.grading.verdict import Grader, Verdict

#: Columns of scored responses, ``[B, k]`` each: a stage that scores writes them, a stage that gives credit reads them.
#: NaN: the response states no valid confidence, or its answer could not be graded.
SCORE_COLUMNS: dict[str, torch.dtype] = {
    "stated_confidence": torch.float64,  # the first and, where the method asks for it, the second confidence
    "correct": torch.float64,  # 1 or 0
    "confidence_length": torch.int64,  # tokens up to the end of the stated confidence
    "segment_ends": torch.int64,  # tokens up to the end of each of the S segments
}


@dataclass(kw_only=True)
class Rollout:
    """``B = P * G`` responses on the CPU; row ``p * G + g`` is response g to prompt p.

    Each stage fills its fields, in this order; before it they are unset or empty.

    Attributes:
        group_size: G.
        lengths: int64 ``[B]``, tokens of each response.
        width: tokens of the longest response, T.
        records: the P questions.
        prompts: token ids of the P prompts.
        token_ids: int64 ``[B, T]``, anything behind a response's end.
        log_probs: float32 ``[B, T]`` of the sampled tokens under the policy that sampled them.
        finished: bool ``[B]``; False if the length limit cut the response off.
        entropy: float32 ``[B]``, nats, mean over the response's tokens.
        texts: the B decoded responses.
        answers: the answer segment of each; of a response without a valid confidence, the whole text.
        stated: float64 ``[P, G]``, the stated confidences; NaN where a response states no valid one.
        stated_after: float64 ``[P, G]``, the second confidences of a method that asks for two; None for the others.
        confidence_lengths: int64 ``[B]``, tokens up to the end of the stated confidence.
        segment_ends: int64 ``[B, S]``, tokens up to the end of each segment; the last are the responses' lengths.
        verdicts: the grader's B verdicts.
        grading_seconds: wall time of grading.
        correct: float64 ``[P, G]``, 1 or 0; NaN where the answer could not be graded.
        credit: rewards and advantages of each segment.
        token_advantages: float32 ``[B, T]``, 0 behind a response's end.
    """

    group_size: int
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
    stated: Tensor = field(init=False)
    stated_after: Tensor | None = None
    confidence_lengths: Tensor = field(init=False)
    segment_ends: Tensor = field(init=False)

    verdicts: Sequence[Verdict] = ()
    grading_seconds: float = 0.0
    correct: Tensor = field(init=False)

    credit: Credit = field(init=False)
    token_advantages: Tensor = field(init=False)

    def read(self, text: TokenText, parser: ResponseParser, max_confidence_tokens: int) -> "Rollout":
        """Decode the responses, parse their confidences and find the ends of their segments.

        Args:
            text: bytes of each token id.
            parser: reads the response format.
            max_confidence_tokens: segment length of a response without a valid confidence.
        """
        assert self.token_ids is not None
        self.texts = text.decode(self.token_ids, self.lengths)
        parsed = [parser(response) for response in self.texts]
        self.answers = [p.answer for p in parsed]
        stated = [confidences([p.confidence for p in parsed])]
        self.stated = stated[0].view(-1, self.group_size)
        if parser.position == "both":
            stated.append(confidences([p.confidence_after for p in parsed]))
            self.stated_after = stated[1].view(-1, self.group_size)
        valid = [~each.isnan() for each in stated]
        given = (self.token_ids, self.lengths, text)
        options: Any = {"max_confidence_tokens": max_confidence_tokens, "position": parser.position}
        self.segment_ends = segment_ends(*given, valid, **options)
        self.confidence_lengths = (
            confidence_segment_lengths(*given, valid[0], **options)
            if parser.position == "last"
            else self.segment_ends[:, 0]
        )
        return self

    def grade(self, grader: Grader) -> "Rollout":
        """Grade the answers."""
        started = time.perf_counter()
        self.verdicts = grader.grade(self.asked, self.answers)
        self.grading_seconds = time.perf_counter() - started
        self.correct = correctness(self.verdicts).view(-1, self.group_size)
        return self

    def scores(self) -> dict[str, Tensor]:
        """The results of scoring as the columns of :data:`SCORE_COLUMNS`."""
        stated = [self.stated] if self.stated_after is None else [self.stated, self.stated_after]
        return {
            "stated_confidence": torch.stack([each.flatten() for each in stated], dim=1),
            "correct": self.correct.view(-1, 1),
            "confidence_length": self.confidence_lengths[:, None],
            "segment_ends": self.segment_ends,
        }

    def load_score_columns(self, columns: Mapping[str, Tensor]) -> "Rollout":
        """Inverse of :meth:`scores`; casts the columns to :data:`SCORE_COLUMNS`."""
        first, *after = stated_decimals(columns["stated_confidence"]).T.reshape(-1, *self._shape)
        self.stated, self.stated_after = first, after[0] if after else None
        self.correct = columns["correct"].to(SCORE_COLUMNS["correct"]).view(self._shape)
        self.confidence_lengths = columns["confidence_length"].to(SCORE_COLUMNS["confidence_length"]).flatten()
        self.segment_ends = columns["segment_ends"].to(SCORE_COLUMNS["segment_ends"])
        return self

    def give_credit(self, rule: CreditRule, reduce: Reduce | None = None) -> "Rollout":
        """Compute rewards, advantages and the advantage of each token; see :class:`CreditRule`.

        Raises:
            ValueError: a wrong shape or dtype.
        """
        of_segment = None
        if rule.entropy_bonus and self.log_probs is not None:
            inside = segment_masks(self.segment_ends, rule.segments, self.width)["confidence"]
            of_segment = torch.where(inside, self.log_probs, 0.0).sum(dim=1).view(-1, self.group_size)
        self.credit = rule(self.correct, self.stated, of_segment, reduce, self.stated_after)
        advantages = [values.flatten() for values in self.credit.values_by_segment().values()]
        self.token_advantages = token_advantages(advantages, self.segment_ends, self.width)
        return self

    @property
    def _shape(self) -> tuple[int, int]:
        return len(self.lengths) // self.group_size, self.group_size

    @property
    def asked(self) -> list[Record]:
        """The question of each response, B of them."""
        return [record for record in self.records for _ in range(self.group_size)]

    @property
    def masks(self) -> SegmentMasks:
        """Tokens of each segment, bool ``[B, T]`` each."""
        return segment_masks(self.segment_ends, list(self.credit.segments), self.width)

    def training_columns(self) -> dict[str, Tensor]:
        """The columns that an update reads: ``advantages`` and ``segment_ends``.

        Returns:
            float32 ``[B, T]``, 0 on padding, and int64 ``[B, S]``.
        """
        return {"advantages": self.token_advantages, "segment_ends": self.segment_ends}

    def rows(self, shown: Iterable[int]) -> list[dict[str, Any]]:
        """Rows of a samples dump: response and verdict where they are known, then the numbers.

        Unknown values are None: the confidence of an invalid response, ``correct`` of an ungradable answer, and the
        reward of a response that takes no part.

        Args:
            shown: indexes into the B responses.
        """
        group, credit, stated = self.group_size, self.credit, self.stated.flatten()
        correct = self.correct.flatten()
        after = {} if self.stated_after is None else {"confidence_after": self.stated_after.flatten()}
        advantages = {name: values.flatten() for name, values in credit.values_by_segment().items()}
        return [
            {
                **self._graded(row),
                **{name: stated_or_none(values[row]) for name, values in {"confidence": stated, **after}.items()},
                "correct": None if bool(correct[row].isnan()) else bool(correct[row]),
                "gesr": _number(credit.gesr[row // group]),
                "confidence_reward": _number(credit.confidence_reward.flatten()[row]),
                **{f"{name}_advantage": float(values[row]) for name, values in advantages.items()},
                "tokens": int(self.lengths[row]),
                "confidence_tokens": int(self.confidence_lengths[row]),
            }
            for row in shown
        ]

    def _graded(self, row: int) -> dict[str, str]:
        if not self.verdicts:
            return {}
        verdict = self.verdicts[row]
        return {"response": self.texts[row], "verdict": verdict.outcome.value, "reason": verdict.reason}


def correctness(verdicts: Iterable[Verdict]) -> Tensor:
    """1 for right, 0 for wrong and NaN for ungradable answers, float64 ``[n]``."""
    known = (verdict.correct_or_none for verdict in verdicts)
    return torch.tensor([math.nan if correct is None else float(correct) for correct in known], dtype=torch.float64)


def confidences(stated: Iterable[float | None]) -> Tensor:
    """Stated confidences as float64 ``[n]``, NaN for None."""
    return torch.tensor([math.nan if value is None else value for value in stated], dtype=torch.float64)


def stated_or_none(value: Tensor) -> float | None:
    """A confidence as it was stated; None for NaN."""
    return None if bool(value.isnan()) else as_stated(float(value))


def _number(value: Tensor) -> float | None:
    return None if bool(value.isnan()) else float(value)
