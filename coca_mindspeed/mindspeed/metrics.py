"""Batch metrics of the rewards, as numbers that MindSpeed-RL's loggers can average over batches and nodes.

MindSpeed-RL averages every list of values under a key.  Ratios that must not be averaged (clip fractions, lengths of
segments over different numbers of tokens) travel as numerator and denominator and are divided at the end, by
:func:`finish`: means over the same number of entries divide to the same ratio as the sums.
"""

import math
from collections.abc import Mapping

from torch import Tensor

from coca_mindspeed.algorithm.advantages import group_varies
from coca_mindspeed.algorithm.rewards import TrainingMethod, brier_reward, group_success_rate
from coca_mindspeed.evaluation.metrics import calibration_metrics

_NUMERATOR, _DENOMINATOR = "/numerator", "/denominator"


def ratio(name: str, numerator: float, denominator: float) -> dict[str, float]:
    """A ratio in two entries, for :func:`finish` to divide."""
    return {name + _NUMERATOR: numerator, name + _DENOMINATOR: denominator}


def finish(metrics: Mapping[str, float]) -> dict[str, float]:
    """Divide the ratios; one without a denominator is undefined and left out."""
    finished = {k: v for k, v in metrics.items() if not k.endswith((_NUMERATOR, _DENOMINATOR))}
    for key, numerator in metrics.items():
        if key.endswith(_NUMERATOR):
            name = key.removesuffix(_NUMERATOR)
            if denominator := metrics[name + _DENOMINATOR]:
                finished[name] = numerator / denominator
    return finished


def batch_metrics(
    correct: Tensor,
    confidence: Tensor,
    confidence_lengths: Tensor,
    response_lengths: Tensor,
    method: TrainingMethod,
    *,
    stage: int,
    invalid_reward: float,
) -> dict[str, float]:
    """What the paper's training curves show, and what tells a healthy run from a hacked one.

    Args:
        correct: bool ``[prompts, group]``.
        confidence: float ``[prompts, group]``, NaN where invalid.
        confidence_lengths: int ``[prompts * group]``, in the order of the groups.
        response_lengths: int ``[prompts * group]``.
        method: decides whether a group has any variance to learn from.
        stage: of the method.
        invalid_reward: of the confidence.

    Returns:
        plain values, and ratios for :func:`finish`.
    """
    success = group_success_rate(correct)
    reward = brier_reward(confidence, success, invalid_reward)
    rewards = method.rewards(correct, confidence, stage=stage, invalid_reward=invalid_reward)
    flat = [~group_varies(segment) for segment in rewards]
    calibration = calibration_metrics(confidence.flatten().numpy(), correct.flatten().numpy(), coverages=())
    valid = calibration.n_valid
    stated = confidence.nansum().item()
    metrics = {
        "coca/confidence_reward": reward.mean().item(),
        "coca/answer_reward": calibration.accuracy,
        "coca/gesr": success.mean().item(),
        "coca/invalid_share": 1 - calibration.success_rate,
        "coca/groups_without_variance": (flat[0] & flat[1]).float().mean().item(),
        "coca/groups_without_answer_variance": (correct == correct[:, :1]).all(dim=1).float().mean().item(),
        "coca/confidence_length": confidence_lengths.float().mean().item(),
        "coca/answer_length": (response_lengths - confidence_lengths).float().mean().item(),
        **ratio("coca/confidence", stated, valid),
    }
    for name, value in (("brier", calibration.brier), ("batch_ece", calibration.ece), ("auroc", calibration.auroc)):
        # Undefined where a dispatch has no valid response, or only right or only wrong ones: it then has no weight.
        weight = 0 if math.isnan(value) else valid
        metrics |= ratio(f"coca/{name}", value * weight if weight else 0.0, weight)
    return metrics
