"""What a batch of judged responses says, under one set of names for every engine.

An engine that judges an iteration in several batches adds them up: each value is a mean and says over how much.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor

from coca_mindspeed.algorithm.credit import SegmentCredit
from coca_mindspeed.evaluation.metrics.calibration import calibration_metrics
from coca_mindspeed.judging.responses import JudgedResponses


class Mean(NamedTuple):
    """A mean over ``weight`` entries; NaN over none."""

    value: float
    weight: float


def batch_metrics(
    correct: Tensor, confidence: Tensor, response_lengths: Tensor, credit: SegmentCredit
) -> dict[str, Mean]:
    """What the paper's training curves show, and what tells a healthy run from a hacked one.

    ECE and AUROC of several batches are averaged, not computed anew: they belong to their batch.

    Args:
        correct: bool ``[P, G]``.
        confidence: float ``[P, G]``, NaN where the response is invalid.
        response_lengths: int ``[P * G]``.
        credit: what the responses earned.
    """
    prompts, responses = len(correct), correct.numel()
    calibration = calibration_metrics(confidence.flatten().numpy(), correct.flatten().numpy(), coverages=())
    valid = calibration.n_valid
    lengths, segment = response_lengths.double(), credit.segment_lengths.double()
    over_responses = {
        "reward/answer": calibration.accuracy,
        "reward/confidence": float(credit.confidence_reward.mean()),
        "rollout/gesr": float(credit.gesr.mean()),
        "rollout/invalid_share": float(confidence.isnan().double().mean()),
        "rollout/accuracy": calibration.accuracy,
        "response/length": float(lengths.mean()),
        "response/confidence_length": float(segment.mean()),
        "response/answer_length": float((lengths - segment).mean()),
    }
    over_groups = {
        "group/no_confidence_variance_share": float((~credit.confidence_varies).double().mean()),
        "group/no_answer_variance_share": float((~credit.answer_varies).double().mean()),
    }
    over_valid = {
        "rollout/confidence": float(confidence.nanmean()),
        "rollout/ece": calibration.ece,
        "rollout/auroc": calibration.auroc,
        "rollout/brier": calibration.brier,
    }
    means = [(over_responses, responses), (over_groups, prompts), (over_valid, valid)]
    return {
        # Undefined where there is nothing to average, or only right or only wrong answers: then it has no weight.
        name: Mean(value, 0 if math.isnan(value) else weight)
        for values, weight in means
        for name, value in values.items()
    }


def grading_metrics(judged: JudgedResponses) -> dict[str, Mean]:
    """The share of answers that could not be graded."""
    return {"grading/ungradable_share": Mean(float(judged.ungradable.double().mean()), len(judged.texts))}


def values(metrics: Mapping[str, Mean]) -> dict[str, float]:
    """The values alone, NaN where undefined."""
    return {name: mean.value for name, mean in metrics.items()}
