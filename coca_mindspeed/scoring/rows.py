"""Rows of a samples dump: what some responses stated, earned and learned, under one set of names for every engine."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from coca_mindspeed.algorithm.credit import SegmentCredit
from coca_mindspeed.algorithm.parsing import as_stated
from coca_mindspeed.data.records import Record
from coca_mindspeed.evaluation.metrics.calibration import calibration_metrics
from coca_mindspeed.evaluation.predictions import UNGRADABLE_SHARE, Prediction
from coca_mindspeed.grading.verdict import Verdict
from coca_mindspeed.scoring.responses import JudgedResponses


def response_row(record: Record, response: str, verdict: Verdict) -> dict[str, Any]:
    """The part of a dump that can be read without numbers: what was asked, said and graded."""
    return {
        "id": record.id,
        "question": record.question,
        "gold": record.answer,
        "response": response,
        "verdict": verdict.outcome.value,
        "reason": verdict.reason,
    }


def credit_rows(
    rows: Iterable[int],
    correct: Tensor,
    confidence: Tensor,
    confidence_lengths: Tensor,
    response_lengths: Tensor,
    credit: SegmentCredit,
) -> list[dict[str, Any]]:
    """The part of a dump that every engine knows; an engine adds question and response.

    None stands for what does not exist: the confidence of an invalid response, whether an ungradable answer is correct,
    and what a response earned that takes no part in its group.

    Args:
        rows: of the batch, which to show.
        correct: bool ``[P, G]``, anything where not gradable.
        confidence: float ``[P, G]``, NaN where the response is invalid.
        confidence_lengths: int ``[P * G]``, tokens up to the end of the stated confidence.
        response_lengths: int ``[P * G]``.
        credit: what the responses earned.
    """
    group = correct.shape[1]
    stated = confidence.flatten()
    return [
        {
            "confidence": None if bool(stated[row].isnan()) else as_stated(float(stated[row])),
            "correct": bool(correct.flatten()[row]) if bool(credit.gradable.flatten()[row]) else None,
            "gesr": _number(credit.gesr[row // group]),
            "confidence_reward": _number(credit.confidence_reward.flatten()[row]),
            "confidence_advantage": float(credit.confidence.flatten()[row]),
            "answer_advantage": float(credit.answer.flatten()[row]),
            "tokens": int(response_lengths[row]),
            "confidence_tokens": int(confidence_lengths[row]),
        }
        for row in rows
    ]


def _number(value: Tensor) -> float | None:
    return None if bool(value.isnan()) else float(value)


def held_out_metrics(
    correct: Tensor, gradable: Tensor, confidence: Tensor, confidence_lengths: Tensor
) -> dict[str, float]:
    """The paper's six columns over the gradable answers; those that are undefined are left out.

    Args:
        correct: bool ``[n]``, anything where not gradable.
        gradable: bool ``[n]``.
        confidence: float ``[n]``, NaN where invalid.
        confidence_lengths: int ``[n]``, tokens until the confidence is known.

    Returns:
        :meth:`CalibrationMetrics.headline`, and ``ungradable_share`` of all answers.
    """
    tokens = torch.where(confidence.isnan(), torch.nan, confidence_lengths.double())
    metrics = calibration_metrics(
        confidence[gradable].numpy(), correct[gradable].numpy(), tokens[gradable].numpy(), coverages=()
    )
    found = {name: float(value) for name, value in metrics.headline().items() if value is not None}
    return {**found, UNGRADABLE_SHARE: float((~gradable).double().mean())}


def predictions(records: Sequence[Record], judged: JudgedResponses) -> list[Prediction]:
    """A prediction for each judged response.

    Args:
        records: the question of each response.
        judged: the responses.
    """
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
            records, judged.texts, judged.parsed, judged.verdicts, judged.confidence_lengths.tolist(), strict=True
        )
    ]
