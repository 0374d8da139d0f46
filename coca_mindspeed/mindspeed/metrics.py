"""Batch metrics of the rewards, as numbers that MindSpeed-RL's loggers can average over batches and nodes.

MindSpeed-RL averages every list of values under a key.  Ratios that must not be averaged (clip fractions, lengths of
segments over different numbers of tokens) travel as numerator and denominator and are divided at the end, by
:func:`finish`: means over the same number of entries divide to the same ratio as the sums.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from coca_mindspeed.algorithm.rewards import TrainingMethod, brier_reward, group_success_rate

_NUMERATOR, _DENOMINATOR = "/numerator", "/denominator"
_BINS = 10


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
    flat_segments = [bool_rows_equal(segment) for segment in rewards]
    valid = ~confidence.isnan()
    stated, right = confidence[valid].double(), correct[valid]
    count = valid.sum().item()
    metrics = {
        "coca/confidence_reward": reward.mean().item(),
        "coca/answer_reward": correct.float().mean().item(),
        "coca/gesr": success.mean().item(),
        "coca/invalid_share": 1 - valid.float().mean().item(),
        "coca/groups_without_variance": (flat_segments[0] & flat_segments[1]).float().mean().item(),
        "coca/groups_without_answer_variance": bool_rows_equal(correct).float().mean().item(),
        "coca/confidence_length": confidence_lengths.float().mean().item(),
        "coca/answer_length": (response_lengths - confidence_lengths).float().mean().item(),
        **ratio("coca/confidence", stated.sum().item(), count),
        **ratio("coca/brier", (stated - right.double()).square().sum().item(), count),
        **ratio("coca/batch_ece", calibration_error(stated, right) * count, count),
    }
    pairs, ordered = ranked_pairs(stated, right)
    return {**metrics, **ratio("coca/auroc", ordered, pairs)}


def bool_rows_equal(rows: Tensor) -> Tensor:
    """Whether all entries of each row are equal: ``[prompts, group]`` to bool ``[prompts]``."""
    return (rows == rows[:, :1]).all(dim=1)


def calibration_error(confidence: Tensor, correct: Tensor) -> float:
    """ECE over 10 equal-width bins, closed on the right, the first on both sides; 0 of nothing.

    Args:
        confidence: float64 ``[n]`` in [0, 1].
        correct: bool ``[n]``.
    """
    if not len(confidence):
        return 0.0
    # Exact decimals such as 0.3 belong to the bin that they close; binary floating point must not move them.
    bins = ((confidence * _BINS - 1e-9).ceil().clamp(1, _BINS) - 1).long()
    gap = torch.zeros(_BINS, dtype=torch.float64).index_add_(0, bins, correct.double() - confidence)
    return gap.abs().sum().item() / len(confidence)


def ranked_pairs(confidence: Tensor, correct: Tensor) -> tuple[int, float]:
    """Pairs of a right and a wrong answer, and those of them that the confidence orders rightly (ties are half)."""
    right, wrong = confidence[correct].sort().values, confidence[~correct].sort().values
    below = torch.searchsorted(wrong, right, right=False)
    through = torch.searchsorted(wrong, right, right=True)
    return len(right) * len(wrong), (below + through).sum().item() / 2


