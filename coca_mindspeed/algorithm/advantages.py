"""Group-relative advantages (paper, equation 9) of each segment and of its tokens."""

from typing import NamedTuple

import torch
from torch import Tensor

from coca_mindspeed.algorithm.checks import check_tensor


class SegmentMasks(NamedTuple):
    """Which tokens belong to which segment, bool ``[batch, tokens]`` both; disjoint, and False on padding."""

    confidence: Tensor
    answer: Tensor


class Advantage(NamedTuple):
    """Advantages of one segment.

    Attributes:
        values: float32 ``[P, G]``, 0 where a response takes no part.
        varies: bool ``[P]``, whether the rewards differ within the group, so that there is something to learn.
    """

    values: Tensor
    varies: Tensor

    def __add__(self, other: "Advantage") -> "Advantage":  # type: ignore[override]
        """The advantage of two rewards that are normalised apart."""
        return Advantage(self.values + other.values, self.varies | other.varies)


# Rewards this close, relative to the largest of their group, are equal: what is left is rounding in float64.
_ROUNDING = 1e-12


def centred(rewards: Tensor) -> tuple[Tensor, Tensor]:
    """``r - mean`` among a group's rewards, and which groups vary.

    Rewards that are equal by definition, as those of confidences .1 and .9 where half of the group is right, may
    differ by rounding; they count as equal, and their group has nothing to teach.

    Args:
        rewards: float64 ``[P, G]``; NaN: takes no part.

    Returns:
        float64 ``[P, G]``, exactly 0 elsewhere and in groups whose rewards are equal; and bool ``[P]``.

    Raises:
        ValueError: a wrong shape or dtype, or an infinite reward.
    """
    check_tensor("rewards", rewards, "float", "prompts", "group")
    if rewards.shape[1] < 2:
        raise ValueError(f"rewards should have at least 2 responses in a group, found {tuple(rewards.shape)}")
    if bool(rewards.isinf().any()):
        raise ValueError("rewards should be finite or NaN, found infinity")
    rewards = rewards.to(torch.float64)
    known = ~rewards.isnan()
    high = rewards.masked_fill(~known, -torch.inf).amax(dim=1)
    low = rewards.masked_fill(~known, torch.inf).amin(dim=1)
    varies = (known.sum(dim=1) >= 2) & (high - low > _ROUNDING * torch.maximum(high.abs(), low.abs()))
    offsets = (rewards - rewards.nanmean(dim=1, keepdim=True)).nan_to_num(0.0)
    return offsets.masked_fill(~varies[:, None], 0.0), varies


def group_advantages(rewards: Tensor, *, ddof: int = 1, eps: float = 1e-6) -> Advantage:
    """``(r - mean) / (std + eps)`` within each group (paper, equation 9), computed in float64.

    Args:
        rewards: as of :func:`centred`.
        ddof: 1 for the sample deviation, as MindSpeed-RL's group_norm; 0 for the population's.
        eps: added to the deviation.  It also damps nearly unanimous groups: see docs/method.md.
    """
    offsets, varies = centred(rewards)
    count = (~rewards.isnan()).sum(dim=1, keepdim=True)
    deviation = (offsets.square().sum(dim=1, keepdim=True) / (count - ddof).clamp(min=1)).sqrt()
    return Advantage(torch.where(varies[:, None], offsets / (deviation + eps), 0.0).to(torch.float32), varies)


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
