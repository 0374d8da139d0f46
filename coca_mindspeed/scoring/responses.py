"""Scoring of sampled responses: decode, parse the confidence, find the end of its segment, grade the answer."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch.nn.utils.rnn import pad_sequence

from coca_mindspeed.algorithm.boundary import TokenText
from coca_mindspeed.algorithm.credit import CreditRule
from coca_mindspeed.algorithm.methods import MethodSettings
from coca_mindspeed.data.records import Record
from coca_mindspeed.errors import Problem, raise_problems
from coca_mindspeed.evaluation.metrics import calibration_metrics
from coca_mindspeed.evaluation.predictions import UNGRADABLE_SHARE, Prediction, outcomes
from coca_mindspeed.grading.verdict import Grader
from coca_mindspeed.scoring.metrics import HELD_OUT, WeightedMean, gap_metrics
from coca_mindspeed.scoring.rollout import Graded, Sampled, confidences
from coca_mindspeed.scoring.settings import ScoringSettings
from coca_mindspeed.utils.custom_code import is_custom


@dataclass(frozen=True, slots=True)
class ResponseScorer:
    """Scores responses of one method."""

    method: MethodSettings  # decides how a response is read
    text: TokenText  # bytes of each token id
    grader: Grader  # grades the answers
    require_evaluated: bool = False  # in training, an answer that only restates its question is wrong

    def __call__(self, sampled: Sampled, records: Sequence[Record]) -> Graded:
        """Read and grade B responses; ``records`` are the questions of their P groups, in the same order.

        Raises ValueError if the groups are not equal in size.
        """
        responses = len(sampled.lengths)
        if not records or responses % len(records):
            raise ValueError(f"expected groups of one size, found {responses} responses to {len(records)} records")
        of_each = [record for record in records for _ in range(responses // len(records))]
        return sampled.read(self.text, self.method).graded(of_each, self.grader)

    def for_training(self, graded: Graded) -> Graded:
        """The same responses with the verdicts that training rewards."""
        return graded.reject_unevaluated() if self.require_evaluated else graded


def training_scorer(settings: ScoringSettings, text: TokenText, grader: Grader) -> ResponseScorer:
    """Build the scorer of a training's responses; every engine has its ``settings``."""
    return ResponseScorer(settings.method, text, grader, settings.require_evaluated)


def held_out_metrics(answers: Sequence[Prediction]) -> dict[str, float]:
    """The paper's six metrics of the gradable answers, if defined, and ``ungradable_share``."""
    graded = outcomes(answers)
    metrics = calibration_metrics(graded.confidence, graded.correct, graded.tokens_to_confidence)
    defined = {name: float(value) for name, value in metrics.headline().items() if value is not None}
    return {**defined, UNGRADABLE_SHARE: (len(answers) - len(graded)) / len(answers)}


def held_out_gap(answers: Sequence[Prediction]) -> dict[str, WeightedMean]:
    """:func:`.gap_metrics` of answers to held-out questions, of which each may have several; NaN without answers."""
    if not answers:
        return gap_metrics(HELD_OUT, torch.empty(0, 1), torch.empty(0, 1))
    by_question: dict[tuple[str, str], list[Prediction]] = {}
    for answer in answers:
        by_question.setdefault((answer.dataset, answer.id), []).append(answer)
    columns = zip(
        *(
            (confidences(answer.correct for answer in each), confidences(answer.confidence for answer in each))
            for each in by_question.values()
        ),
        strict=True,
    )
    correct, stated = (pad_sequence(list(column), batch_first=True, padding_value=math.nan) for column in columns)
    return gap_metrics(HELD_OUT, correct, stated)


def check_custom_method(method: MethodSettings) -> None:
    """Give credit for a small group in each stage of a custom method; raises ConfigError if that fails."""
    if not is_custom(method.name):
        return
    correct, stated = torch.tensor([[1.0, 0.0, 1.0, math.nan]]), torch.tensor([[0.9, 0.2, math.nan, 0.5]])
    for stage, name in enumerate(method.training_method.stages):
        try:
            CreditRule(method, stage)(correct, stated, torch.zeros(1, 4), stated_after=stated)
        except Exception as error:  # noqa: BLE001  the user's own code
            reason = f"its advantages failed for a group of four, stage {name}: {type(error).__name__}: {error}"
            raise_problems([Problem("own-method", "method.name", method.name, reason, "see docs/library.md")])


def predictions(graded: Graded) -> list[Prediction]:
    """Make a prediction of each graded response."""
    after = torch.full_like(graded.stated, math.nan) if graded.stated_after is None else graded.stated_after
    columns = [[None if math.isnan(s) else s for s in each.tolist()] for each in (graded.stated, after)]
    return [
        Prediction(
            id=record.id,
            dataset=record.dataset,
            question=record.question,
            response=text,
            confidence=confidence,
            correct=verdict.correct_or_none,
            tokens_to_confidence=None if confidence is None else tokens,
            confidence_after=second,
        )
        for record, text, confidence, second, verdict, tokens in zip(
            graded.records, graded.texts, *columns, graded.verdicts, graded.confidence_lengths.tolist(), strict=True
        )
    ]


def held_out_predictions(graded: Graded, method: str) -> list[Prediction]:
    """:func:`predictions` with what a file of a validation holds besides; ``method`` is the training method's name."""
    lengths = graded.lengths.tolist()
    return [
        replace(prediction, method=method, category=record.category, gold=record.answer, tokens=tokens)
        for prediction, record, tokens in zip(predictions(graded), graded.records, lengths, strict=True)
    ]
