"""Held-out questions: the predictions that judged responses make, and their metrics while training."""

from collections.abc import Sequence

import torch
from torch import Tensor

from coca_mindspeed.data.records import Record
from coca_mindspeed.evaluation.metrics.calibration import calibration_metrics
from coca_mindspeed.evaluation.predictions import UNGRADABLE_SHARE, Prediction
from coca_mindspeed.judging.responses import JudgedResponses


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
