"""Sampled tokens taken apart and graded: text, stated confidence, the end of its segment, right or wrong."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from coca_mindspeed.algorithm.boundary import TokenText, confidence_segment_lengths
from coca_mindspeed.algorithm.credit import CreditRule
from coca_mindspeed.algorithm.parsing import ParsedResponse, ResponseParser
from coca_mindspeed.config.schema import MethodConfig
from coca_mindspeed.data.records import Record
from coca_mindspeed.grading.verdict import Grader, Outcome, Verdict


class ReadResponses(NamedTuple):
    """Text, stated confidence and answer of ``n`` responses.

    Attributes:
        texts: decoded responses.
        parsed: stated confidence and answer of each.
        confidence: float64 ``[n]``, NaN where the response is invalid.
        confidence_lengths: int64 ``[n]``, as :func:`confidence_segment_lengths` returns them.
    """

    texts: list[str]
    parsed: list[ParsedResponse]
    confidence: Tensor
    confidence_lengths: Tensor


def read_responses(
    token_ids: Tensor, response_lengths: Tensor, text: TokenText, parser: ResponseParser, max_confidence_tokens: int
) -> ReadResponses:
    """Decode responses, parse their confidence and find the end of its segment.

    Args:
        token_ids: int64 ``[n, tokens]`` on the CPU, padded on the right with anything.
        response_lengths: int64 ``[n]`` on the CPU.
        text: bytes of each token id.
        parser: of the response format.
        max_confidence_tokens: segment length of an invalid response.
    """
    texts = text.decode(token_ids, response_lengths)
    parsed = [parser(response) for response in texts]
    confidence = torch.tensor([math.nan if p.confidence is None else p.confidence for p in parsed], dtype=torch.float64)
    lengths = confidence_segment_lengths(
        token_ids,
        response_lengths,
        text,
        ~confidence.isnan(),
        max_confidence_tokens=max_confidence_tokens,
        position=parser.position,
    )
    return ReadResponses(texts, parsed, confidence, lengths)


@dataclass(frozen=True, slots=True)
class JudgedResponses:
    """``n`` responses, on the CPU; where they form groups, one group after the other.

    Attributes:
        texts: decoded responses.
        parsed: stated confidence and answer of each.
        verdicts: of the grader, on each answer.
        correct: bool ``[n]``, False where not gradable.
        confidence: float64 ``[n]``, NaN where the response is invalid.
        confidence_lengths: int64 ``[n]``, tokens up to the end of the closing tag; of an invalid response the tokens
            that stand in for its confidence.
        grading_seconds: wall time of grading alone.
    """

    texts: list[str]
    parsed: list[ParsedResponse]
    verdicts: list[Verdict]
    correct: Tensor
    confidence: Tensor
    confidence_lengths: Tensor
    grading_seconds: float

    @property
    def gradable(self) -> Tensor:
        """Answers that could be graded; the others are neither right nor wrong, and left out: bool ``[n]``."""
        return torch.tensor([verdict.outcome is not Outcome.UNGRADABLE for verdict in self.verdicts], dtype=torch.bool)


@dataclass(frozen=True, slots=True)
class ResponseJudge:
    """Judges responses of one format.

    Attributes:
        text: bytes of each token id.
        parser: of the method's response format.
        grader: of the answers.
        max_confidence_tokens: tokens that stand in for the confidence of an invalid response.
    """

    text: TokenText
    parser: ResponseParser
    grader: Grader
    max_confidence_tokens: int

    def __call__(self, token_ids: Tensor, response_lengths: Tensor, records: Sequence[Record]) -> JudgedResponses:
        """Decode, parse, find the boundary, grade.

        Args:
            token_ids: int64 ``[n, tokens]`` on the CPU, padded on the right with anything.
            response_lengths: int64 ``[n]`` on the CPU.
            records: the question of each response.
        """
        read = read_responses(token_ids, response_lengths, self.text, self.parser, self.max_confidence_tokens)
        start = time.perf_counter()
        verdicts = self.grader.grade(records, [p.answer for p in read.parsed])
        return JudgedResponses(
            texts=read.texts,
            parsed=read.parsed,
            verdicts=verdicts,
            correct=torch.tensor([verdict.correct for verdict in verdicts], dtype=torch.bool),
            confidence=read.confidence,
            confidence_lengths=read.confidence_lengths,
            grading_seconds=time.perf_counter() - start,
        )


def response_judge(method: MethodConfig, text: TokenText, grader: Grader) -> ResponseJudge:
    """The judge of a method's responses.

    Args:
        method: says where the confidence stands, and its format.
        text: bytes of each token id.
        grader: of the answers.
    """
    return ResponseJudge(text, method.parser(), grader, method.max_confidence_tokens)


def credit_rule(method: MethodConfig, stage: int) -> CreditRule:
    """How the rewards of one of a method's stages become advantages."""
    return CreditRule(
        method.training_method,
        stage,
        invalid_reward=method.invalid_reward,
        ddof=method.advantage_ddof,
        eps=method.advantage_eps,
        separate_format=method.separate_format,
    )
