"""What a batch of judged responses says, under one set of names for every engine.

An engine that judges an iteration in several batches adds them up: each value is a mean and says over how much.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor

from coca_mindspeed.algorithm.credit import SegmentCredit
from coca_mindspeed.evaluation.metrics.calibration import calibration_metrics


class Mean(NamedTuple):
    """A mean over ``weight`` entries; NaN over none."""

    value: float
    weight: float


def batch_metrics(
    correct: Tensor, confidence: Tensor, response_lengths: Tensor, credit: SegmentCredit
) -> dict[str, Mean]:
    """What the paper's training curves show, and what tells a healthy run from a hacked one.

    An ungradable answer is neither right nor wrong: what rewards and verdicts say is over the others.  ECE and AUROC of
    several batches are averaged, not computed anew: they belong to their batch.

    Args:
        correct: bool ``[P, G]``, anything where not gradable.
        confidence: float ``[P, G]``, NaN where the response is invalid.
        response_lengths: int ``[P * G]``.
        credit: what the responses earned.
    """
    graded = credit.gradable
    calibration = calibration_metrics(confidence[graded].numpy(), correct[graded].numpy(), coverages=())
    lengths, segment = response_lengths.double(), credit.segment_lengths.double()
    earned = ~credit.confidence_reward.isnan()
    means = [
        (
            correct.numel(),
            {
                "grading/ungradable_share": float((~graded).double().mean()),
                "rollout/invalid_share": float(confidence.isnan().double().mean()),
                "response/length": float(lengths.mean()),
                "response/confidence_length": float(segment.mean()),
                "response/answer_length": float((lengths - segment).mean()),
            },
        ),
        (int((~confidence.isnan()).sum()), {"rollout/confidence": float(confidence.nanmean())}),
        (int(graded.sum()), {"reward/answer": calibration.accuracy, "rollout/accuracy": calibration.accuracy}),
        (int(earned.sum()), {"reward/confidence": float(credit.confidence_reward.nanmean())}),
        (
            calibration.n_valid,
            {
                "rollout/ece": calibration.ece,
                "rollout/auroc": calibration.auroc,
                "rollout/brier": calibration.brier,
            },
        ),
        (len(correct), {"group/dropped_share": float((~credit.kept).double().mean())}),
        (
            int(credit.kept.sum()),
            {
                "rollout/gesr": float(credit.gesr.nanmean()),
                "group/no_confidence_variance_share": float((~credit.confidence_varies[credit.kept]).double().mean()),
                "group/no_answer_variance_share": float((~credit.answer_varies[credit.kept]).double().mean()),
            },
        ),
    ]
    return {
        # Undefined where there is nothing to average, or only right or only wrong answers: then it has no weight.
        name: Mean(value, 0 if math.isnan(value) else weight)
        for weight, values in means
        for name, value in values.items()
    }


def values(metrics: Mapping[str, Mean]) -> dict[str, float]:
    """The values alone, NaN where undefined."""
    return {name: mean.value for name, mean in metrics.items()}
