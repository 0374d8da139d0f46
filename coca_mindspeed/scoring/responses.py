"""Scoring of sampled responses: decode, parse the confidence, find the end of its segment, grade the answer."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from coca_mindspeed.algorithm.boundary import TokenText, confidence_segment_lengths
from coca_mindspeed.algorithm.credit import CreditRule
from coca_mindspeed.algorithm.parsing import ParsedResponse, ResponseParser
from coca_mindspeed.config.schema import MethodConfig
from coca_mindspeed.data.records import Record
from coca_mindspeed.evaluation.metrics.calibration import calibration_metrics
from coca_mindspeed.evaluation.predictions import UNGRADABLE_SHARE, Prediction
from coca_mindspeed.grading.verdict import Grader, Outcome, Verdict


@dataclass(frozen=True, slots=True)
class ReadResponses:
    """``n`` decoded and parsed responses, on the CPU.

    Attributes:
        texts: decoded responses.
        parsed: confidence and answer of each.
        confidence: float64 ``[n]``, NaN where the response is invalid.
        confidence_lengths: int64 ``[n]``, tokens up to the end of the closing tag; ``max_confidence_tokens`` at most
            where the response is invalid.
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
class ScoredResponses(ReadResponses):
    """``n`` scored responses.

    Attributes:
        verdicts: of the grader.
        correct: bool ``[n]``, False where not gradable.
        grading_seconds: wall time of the grader.
    """

    verdicts: list[Verdict]
    correct: Tensor
    grading_seconds: float

    @property
    def gradable(self) -> Tensor:
        """Whether each answer could be graded, bool ``[n]``."""
        return torch.tensor([verdict.outcome is not Outcome.UNGRADABLE for verdict in self.verdicts], dtype=torch.bool)


@dataclass(frozen=True, slots=True)
class ResponseScorer:
    """Scores responses of one format.

    Attributes:
        text: bytes of each token id.
        parser: of the response format.
        grader: of the answers.
        max_confidence_tokens: segment length of an invalid response.
    """

    text: TokenText
    parser: ResponseParser
    grader: Grader
    max_confidence_tokens: int

    def __call__(self, token_ids: Tensor, response_lengths: Tensor, records: Sequence[Record]) -> ScoredResponses:
        """Score responses.

        Args:
            token_ids: int64 ``[n, tokens]`` on the CPU, padded on the right with anything.
            response_lengths: int64 ``[n]`` on the CPU.
            records: the question of each response.
        """
        read = read_responses(token_ids, response_lengths, self.text, self.parser, self.max_confidence_tokens)
        start = time.perf_counter()
        verdicts = self.grader.grade(records, [p.answer for p in read.parsed])
        seconds = time.perf_counter() - start
        correct = torch.tensor([verdict.correct for verdict in verdicts], dtype=torch.bool)
        return ScoredResponses(
            read.texts, read.parsed, read.confidence, read.confidence_lengths, verdicts, correct, seconds
        )


def response_scorer(method: MethodConfig, text: TokenText, grader: Grader) -> ResponseScorer:
    """Build the scorer of a method's responses."""
    return ResponseScorer(text, method.parser(), grader, method.max_confidence_tokens)


def credit_rule(method: MethodConfig, stage: int) -> CreditRule:
    """Build the rule that turns the rewards of a method's stage into advantages."""
    return CreditRule(
        method.training_method,
        stage,
        invalid_reward=method.invalid_reward,
        ddof=method.advantage_ddof,
        eps=method.advantage_eps,
        separate_format=method.separate_format,
        entropy_bonus=method.entropy_bonus,
        scale=method.advantage_scale,
    )


def held_out_metrics(
    correct: Tensor, gradable: Tensor, confidence: Tensor, confidence_lengths: Tensor
) -> dict[str, float]:
    """The paper's six columns over the gradable answers, without the undefined ones, and ``ungradable_share``.

    Args:
        correct: bool ``[n]``, anything where not gradable.
        gradable: bool ``[n]``.
        confidence: float ``[n]``, NaN where invalid.
        confidence_lengths: int ``[n]``, tokens until the confidence is known.
    """
    tokens = torch.where(confidence.isnan(), torch.nan, confidence_lengths.double())
    metrics = calibration_metrics(confidence[gradable].numpy(), correct[gradable].numpy(), tokens[gradable].numpy())
    found = {name: float(value) for name, value in metrics.headline().items() if value is not None}
    return {**found, UNGRADABLE_SHARE: float((~gradable).double().mean())}


def predictions(records: Sequence[Record], scored: ScoredResponses) -> list[Prediction]:
    """Make a prediction of each scored response; ``records`` holds the question of each."""
    return [
        Prediction(
            id=record.id,
            dataset=record.dataset,
            question=record.question,
            response=text,
            confidence=parsed.confidence,
            correct=verdict.correct_or_none,
            tokens_to_confidence=None if parsed.confidence is None else tokens,
        )
        for record, text, parsed, verdict, tokens in zip(
            records, scored.texts, scored.parsed, scored.verdicts, scored.confidence_lengths.tolist(), strict=True
        )
    ]
