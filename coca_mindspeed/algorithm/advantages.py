"""Group-relative advantages (paper, equation 9) of each segment and of its tokens."""

from typing import NamedTuple

import torch
from torch import Tensor

from coca_mindspeed.algorithm.checks import check_tensor


class SegmentMasks(NamedTuple):
    """Which tokens belong to which segment, bool ``[batch, tokens]`` both; disjoint, and False on padding."""

    confidence: Tensor
    answer: Tensor


# Rewards this close, relative to the largest of their group, are equal: what is left is rounding in float64.
_ROUNDING = 1e-12


def group_varies(rewards: Tensor) -> Tensor:
    """Which groups have rewards that differ at all: float ``[prompts, group]`` to bool ``[prompts]``.

    Rewards that are equal by definition, as those of confidences .1 and .9 where half of the group is right, may
    differ by rounding, and do not count as different.
    """
    spread = rewards.amax(dim=1) - rewards.amin(dim=1)
    return spread > _ROUNDING * rewards.abs().amax(dim=1)


def group_advantages(rewards: Tensor, *, ddof: int = 1, eps: float = 1e-6) -> Tensor:
    """``(r - mean) / (std + eps)`` within each group, computed in float64.

    A group whose rewards are all equal (:func:`group_varies`) has nothing to teach and gets exactly zero, whatever
    rounding does to its mean.

    Args:
        rewards: float ``[prompts, group]``, with at least 2 in a group; float64 from :mod:`rewards`, since eps is as
            small as float32's rounding.
        ddof: 1 for the sample deviation, as MindSpeed-RL's group_norm; 0 for the population's.
        eps: added to the deviation.  It also damps nearly unanimous groups: see docs/method.md.

    Returns:
        float32 ``[prompts, group]``.

    Raises:
        ValueError: wrong shape or dtype, or a reward that is not finite.
    """
    check_tensor("rewards", rewards, "float", "prompts", "group")
    if rewards.shape[1] < 2:
        raise ValueError(f"rewards should have at least 2 responses in a group, found {tuple(rewards.shape)}")
    if not bool(rewards.isfinite().all()):
        raise ValueError("rewards should be finite, found NaN or infinity")
    rewards = rewards.to(torch.float64)
    deviation = rewards.std(dim=1, keepdim=True, correction=ddof)
    advantages = (rewards - rewards.mean(dim=1, keepdim=True)) / (deviation + eps)
    return torch.where(group_varies(rewards)[:, None], advantages, 0.0).to(torch.float32)


def centred_rewards(rewards: Tensor) -> Tensor:
    """``r - mean`` within each group, float64 ``[prompts, group]``; exactly zero where a group's rewards are equal.

    ``rewards`` as in :func:`group_advantages`.
    """
    rewards = rewards.to(torch.float64)
    return torch.where(group_varies(rewards)[:, None], rewards - rewards.mean(dim=1, keepdim=True), 0.0)


def segment_masks(confidence_lengths: Tensor, response_lengths: Tensor, width: int) -> SegmentMasks:
    """Masks over ``width`` response tokens, from the lengths of confidence segments and responses, int ``[batch]``."""
    _check_lengths(confidence_lengths, response_lengths, width)
    position = torch.arange(width, device=response_lengths.device)
    confidence = position < confidence_lengths[:, None]
    return SegmentMasks(confidence, (position < response_lengths[:, None]) & ~confidence)


def token_advantages(
    confidence: Tensor, answer: Tensor, confidence_lengths: Tensor, response_lengths: Tensor, width: int
) -> Tensor:
    """Put each segment's advantage on its own tokens (paper, equation 10), and 0 on padding.

    Args:
        confidence, answer: float ``[batch]``, advantage of each segment.
        confidence_lengths, response_lengths: int ``[batch]``.
        width: tokens of the padded responses.

    Returns:
        float32 ``[batch, width]``.
    """
    _check_lengths(confidence_lengths, response_lengths, width)
    for name, advantage in (("confidence", confidence), ("answer", answer)):
        check_tensor(name, advantage, "float", *response_lengths.shape, device=response_lengths.device)
    # int32 positions halve the traffic of the one comparison that runs over the whole matrix.
    position = torch.arange(width, device=response_lengths.device, dtype=torch.int32)
    inside = position < response_lengths[:, None].to(torch.int32)
    result = torch.where(inside, answer[:, None].to(torch.float32), 0.0)
    # Confidence segments are short, so only the columns that any of them reaches are written twice.
    reach = int(confidence_lengths.max()) if len(confidence_lengths) else 0
    in_confidence = position[:reach] < confidence_lengths[:, None]
    result[:, :reach] = torch.where(in_confidence, confidence[:, None].to(torch.float32), result[:, :reach])
    return result


def per_token_of_segment(advantages: Tensor, masks: SegmentMasks) -> Tensor:
    """Each token's advantage divided by the tokens of its own segment, so that a sum over tokens is a mean.

    With these, an objective that sums the tokens of a response is the one that averages each of its segments: a
    positive factor passes through minimum and clip.

    Args:
        advantages: float ``[batch, width]``, 0 on padding.
        masks: bool ``[batch, width]`` each.
    """
    tokens = sum(mask * mask.sum(dim=1, keepdim=True) for mask in masks)
    return advantages / torch.as_tensor(tokens).clamp(min=1)


def _check_lengths(confidence_lengths: Tensor, response_lengths: Tensor, width: int) -> None:
    check_tensor("response_lengths", response_lengths, "int", "batch")
    check_tensor(
        "confidence_lengths", confidence_lengths, "int", *response_lengths.shape, device=response_lengths.device
    )
    wrong = (confidence_lengths < 0) | (confidence_lengths > response_lengths) | (response_lengths > width)
    if bool(wrong.any()):
        row = int(wrong.nonzero()[0])
        raise ValueError(
            f"response {row}: expected 0 <= confidence tokens <= response tokens <= {width}, "
            f"found {int(confidence_lengths[row])} and {int(response_lengths[row])}"
        )
