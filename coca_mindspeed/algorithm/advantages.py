"""Group-relative advantages (paper, equation 9) of each segment and of its tokens."""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from coca_mindspeed.algorithm import AdvantageScale, check_tensor

#: Tokens of each segment by its name, in the order of the response: bool ``[B, T]``, disjoint, and False on
#: padding.
SegmentMasks = dict[str, Tensor]
#: Adds up (sum of squares, count) over all processes of a step.
Reduce = Callable[[float, int], tuple[float, int]]


class Advantage(NamedTuple):
    """Advantages of one segment.

    Attributes:
        values: float32 ``[P, G]``, 0 where a response takes no part.
        varies: bool ``[P]``, whether the rewards differ within the group, so that there is something to learn.
        deviation: the step's deviation that ``batch`` divided by (of a sum: its first part's); 0 with another scale.
    """

    values: Tensor
    varies: Tensor
    deviation: float = 0.0

    def __add__(self, other: "Advantage") -> "Advantage":  # type: ignore[override]
        """Add the advantages of two rewards, each with a normalisation of its own."""
        deviation = self.deviation or other.deviation
        return Advantage(self.values + other.values, self.varies | other.varies, deviation)


# Rewards that are this close, relative to the largest of their group, are equal up to float64 rounding.
_ROUNDING = 1e-12
_LEAST_DEVIATION = 1e-8  # added to the step's deviation


def centred(rewards: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``r - mean`` within each group, float64 ``[P, G]``, and whether its rewards vary, bool ``[P]``.

    ``rewards`` are float64 ``[P, G]``; NaN takes no part and becomes 0.  Rewards that are equal by definition (of
    confidences .1 and .9 where half of the group is right) may differ by rounding; they count as equal, exactly 0.
    Raises ValueError for a wrong shape or dtype, or an infinite reward.
    """
    check_tensor("rewards", rewards, "float", "prompts", "group")
    if rewards.shape[1] < 2:
        raise ValueError(f"rewards should have at least 2 responses in a group, found {tuple(rewards.shape)}")
    if bool(rewards.isinf().any()):
        raise ValueError("rewards should be finite or NaN, found infinity")
    rewards = rewards.to(torch.float64)
    graded_PG = ~rewards.isnan()
    high_P = rewards.masked_fill(~graded_PG, -torch.inf).amax(dim=1)
    low_P = rewards.masked_fill(~graded_PG, torch.inf).amin(dim=1)
    varies_P = (graded_PG.sum(dim=1) >= 2) & (high_P - low_P > _ROUNDING * torch.maximum(high_P.abs(), low_P.abs()))
    offsets_PG = (rewards - rewards.nanmean(dim=1, keepdim=True)).nan_to_num(0.0)
    return offsets_PG.masked_fill(~varies_P[:, None], 0.0), varies_P


def group_advantages(rewards: Tensor, *, ddof: int = 1, eps: float = 1e-6) -> Advantage:
    """``(r - mean) / (std + eps)`` within each group (paper, equation 9) of rewards as of :func:`centred`, in float64.

    ``ddof`` 1 is the sample deviation, as MindSpeed-RL's group_norm; 0 the population's.  ``eps`` is added to the
    deviation, which also damps nearly unanimous groups: see docs/method.md.
    """
    offsets_PG, varies_P = centred(rewards)
    count_P1 = (~rewards.isnan()).sum(dim=1, keepdim=True)
    deviation_P1 = (offsets_PG.square().sum(dim=1, keepdim=True) / (count_P1 - ddof).clamp(min=1)).sqrt()
    return Advantage(torch.where(varies_P[:, None], offsets_PG / (deviation_P1 + eps), 0.0).to(torch.float32), varies_P)


@dataclass(frozen=True)
class Normalisation:
    """Rule that turns a step's rewards, float64 ``[P, G]`` with NaN for no part, into advantages.

    ``reduce`` adds up a sum of squares and a count over the processes that share a step; None: this process has the
    whole step.  The other attributes are those of :class:`.methods.settings.MethodSettings`.
    """

    scale: AdvantageScale = "group"
    ddof: int = 1
    eps: float = 1e-6
    separate_format: bool = True
    reduce: Reduce | None = None

    def within_group(self, rewards: Tensor) -> Advantage:
        """Divide by each group's own deviation, whatever the scale."""
        return group_advantages(rewards, ddof=self.ddof, eps=self.eps)

    def by_scale(self, rewards: Tensor) -> Advantage:
        """Divide by the deviation that ``scale`` names."""
        if self.scale == "group":
            return self.within_group(rewards)
        offsets_PG, varies_P = centred(rewards)
        if self.scale == "none":
            return Advantage(offsets_PG.to(torch.float32), varies_P)
        graded_PG = ~rewards.isnan()
        # fsum does not depend on the order of the groups.
        squares, count = math.fsum(offsets_PG[graded_PG].square().tolist()), int(graded_PG.sum())
        if self.reduce is not None:
            squares, count = self.reduce(squares, count)
        deviation = math.sqrt(squares / max(1, count)) + _LEAST_DEVIATION
        return Advantage((offsets_PG / deviation).to(torch.float32), varies_P, deviation)

    def of_confidence(self, scores: Tensor, stated: Tensor) -> Advantage:
        """Normalise the scores of ``stated`` confidences by ``scale`` and ``separate_format``."""
        if not self.separate_format:
            return self.by_scale(scores)
        valid_PG = ~stated.isnan()
        among_valid = self.by_scale(scores.masked_fill(~valid_PG, torch.nan))
        return among_valid + self.within_group(valid_PG.double().masked_fill(scores.isnan(), torch.nan))


def segment_masks(ends: Tensor, segments: Sequence[str], width: int) -> SegmentMasks:
    """Masks over ``width`` response tokens, by the names of the S ``segments``.

    ``ends``, int ``[B, S]``: the tokens of each response up to the end of each segment; the last is its length.
    """
    _check_ends(ends, len(segments), width)
    position_T = torch.arange(width, device=ends.device)
    before_BT = [position_T < end[:, None] for end in ends.unbind(dim=1)]
    own_BT = before_BT[:1] + [until & ~earlier for earlier, until in pairwise(before_BT)]
    return dict(zip(segments, own_BT, strict=True))


def token_advantages(advantages: Sequence[Tensor], ends: Tensor, width: int) -> Tensor:
    """Put each segment's advantage, float ``[B]``, on its own tokens (paper, equation 10), and 0 on padding.

    Returns float32 ``[B, T]``, T = ``width``; ``ends`` as of :func:`segment_masks`.
    """
    _check_ends(ends, len(advantages), width)
    for advantage in advantages:
        check_tensor("advantages", advantage, "float", len(ends), device=ends.device)
    # int32 positions halve the traffic of the comparison.
    position_T = torch.arange(width, device=ends.device, dtype=torch.int32)
    *earlier, last = zip(advantages, ends.to(torch.int32).unbind(dim=1), strict=True)
    result_BT = torch.where(position_T < last[1][:, None], last[0][:, None].to(torch.float32), 0.0)
    # Each earlier segment overwrites the columns that it reaches, which are few for a confidence that comes first.
    for advantage, end in reversed(earlier):
        reach = int(end.max()) if len(end) else 0
        inside_BT = position_T[:reach] < end[:, None]
        result_BT[:, :reach] = torch.where(inside_BT, advantage[:, None].to(torch.float32), result_BT[:, :reach])
    return result_BT


def any_segment(masks: SegmentMasks) -> Tensor:
    """The tokens of all segments, bool ``[B, T]``."""
    return functools.reduce(torch.logical_or, masks.values())


def _check_ends(ends: Tensor, segments: int, width: int) -> None:
    check_tensor("ends", ends, "int", "batch", segments)
    wrong_B = (ends[:, 0] < 0) | (ends.diff(dim=1) < 0).any(dim=1) | (ends[:, -1] > width)
    if bool(wrong_B.any()):
        row = int(wrong_B.nonzero()[0])
        raise ValueError(
            f"response {row}: expected ends of segments that ascend from 0 to at most {width}, found "
            f"{ends[row].tolist()}"
        )
