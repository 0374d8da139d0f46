"""Held-out questions: the predictions that judged responses make, and their metrics while training."""

from collections.abc import Sequence

import torch
from torch import Tensor

from coca_mindspeed.data.records import Record
from coca_mindspeed.evaluation.metrics.calibration import calibration_metrics
from coca_mindspeed.evaluation.predictions import Prediction
from coca_mindspeed.judging.responses import JudgedResponses


def held_out_metrics(correct: Tensor, confidence: Tensor, confidence_lengths: Tensor) -> dict[str, float]:
    """The paper's six columns; those that are undefined are left out.

    Args:
        correct: bool ``[n]``.
        confidence: float ``[n]``, NaN where invalid.
        confidence_lengths: int ``[n]``, tokens until the confidence is known.

    Returns:
        :meth:`CalibrationMetrics.headline`.
    """
    metrics = calibration_metrics(
        confidence.numpy(),
        correct.numpy(),
        torch.where(confidence.isnan(), torch.nan, confidence_lengths.double()).numpy(),
        coverages=(),
    )
    return {name: float(value) for name, value in metrics.headline().items() if value is not None}


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
            correct=verdict.correct,
            tokens_to_confidence=None if parsed.confidence is None else tokens,
        )
        for record, text, parsed, verdict, tokens in zip(
            records, judged.texts, judged.parsed, judged.verdicts, judged.confidence_lengths.tolist(), strict=True
        )
    ]
