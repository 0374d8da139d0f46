"""The clipped objective (paper, equations 10 and 11), its aggregation over tokens, and its metrics by segment."""

from typing import NamedTuple, get_args

import torch
from torch import Tensor

from coca_mindspeed.algorithm import LossAggregation, check_tensor
from coca_mindspeed.algorithm.advantages import SegmentMasks, any_segment

# exp(60) is 1e26: far beyond every clip, and sums of it stay within float32.
_LARGEST_LOG_RATIO = 60.0


class SegmentStatistics(NamedTuple):
    """Sums over one segment's tokens, scalar tensors.  Sums over microbatches equal the batch's."""

    tokens: Tensor
    clipped: Tensor
    kl: Tensor
    advantage: Tensor

    def __add__(self, other: "SegmentStatistics") -> "SegmentStatistics":  # type: ignore[override]
        """Add the sums of two parts of a batch (a tuple's own ``+`` would concatenate)."""
        return SegmentStatistics(*(a + b for a, b in zip(self, other, strict=True)))

    def sums(self) -> dict[str, float]:
        """The sums by the metrics that they make, divided by ``tokens``: ``clip_fraction``, ``kl``, ``advantage``."""
        return {"clip_fraction": float(self.clipped), "kl": float(self.kl), "advantage": float(self.advantage)}

    def means(self) -> dict[str, float]:
        """``clip_fraction``, ``kl`` and ``advantage``, each a mean over the segment's tokens; 0 if it has none."""
        tokens = float(self.tokens)
        return {name: value / tokens if tokens else 0.0 for name, value in self.sums().items()}


class Objective(NamedTuple):
    """Result of :func:`segment_objective`: a scalar loss to minimise, and detached statistics of each segment."""

    loss: Tensor
    segments: dict[str, SegmentStatistics]


def segment_objective(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    masks: SegmentMasks,
    *,
    clip: float = 0.2,
    aggregation: LossAggregation = "sum",
    responses: int | None = None,
    tokens: int | None = None,
) -> Objective:
    """Minus the mean over responses of ``min(rho A, clip(rho, 1 - clip, 1 + clip) A)`` summed over tokens.

    Aggregations: ``sum`` adds a response's token terms and averages over responses (the paper); ``token_mean``
    averages over all response tokens of the batch (MindSpeed-RL's own); ``segment_mean`` averages each segment over
    its own tokens, adds these means, and averages over responses.

    Args:
        log_probs: float ``[B, T]`` under the policy being trained, with gradient.
        old_log_probs: float ``[B, T]`` under the policy that sampled; anything on padding.
        advantages: float ``[B, T]``.
        masks: bool ``[B, T]`` each.
        clip: epsilon of the ratio's trust region.
        aggregation: see above.
        responses: responses of the whole batch, if this is a microbatch of it; default: the rows given.
        tokens: response tokens of the whole batch, likewise, for ``token_mean``.

    Returns:
        The loss (microbatches' losses sum to the batch's) and each segment's statistics: tokens, tokens whose
        gradient the clip cut off, the k3 estimate of KL(old || new) (Schulman, 2020), and the advantage.

    Raises ValueError: mismatching shapes, dtypes or devices, or an unknown aggregation.
    """
    _check(log_probs, old_log_probs, advantages, masks)
    inside_BT = any_segment(masks)
    # Padding may hold anything, infinities included: select before the exponential, or its gradient is NaN.
    log_ratio_BT = torch.where(inside_BT, log_probs - old_log_probs, 0.0)
    advantages = torch.where(inside_BT, advantages, 0.0)
    # exp overflows in float32 beyond 88.  Where the clip holds the term anyway, the gradient must not be 0 * inf.
    ratio_BT = torch.where(advantages < 0, log_ratio_BT, log_ratio_BT.clamp(max=_LARGEST_LOG_RATIO)).exp()
    clipped_ratio_BT = ratio_BT.clamp(1 - clip, 1 + clip)
    terms_BT = torch.minimum(ratio_BT * advantages, clipped_ratio_BT * advantages)
    responses = len(log_probs) if responses is None else responses

    if aggregation == "sum":
        gain = terms_BT.sum() / responses
    elif aggregation == "token_mean":
        gain = terms_BT.sum() / (inside_BT.sum().clamp(min=1) if tokens is None else max(tokens, 1))
    elif aggregation == "segment_mean":
        means_B = [(terms_BT * mask).sum(dim=1) / mask.sum(dim=1).clamp(min=1) for mask in masks.values()]
        gain = torch.stack(means_B).sum() / responses
    else:
        raise ValueError(f"unknown loss aggregation {aggregation!r}; known: {', '.join(get_args(LossAggregation))}")

    with torch.no_grad():
        cut_BT = clipped_ratio_BT * advantages < ratio_BT * advantages
        kl_BT = log_ratio_BT.clamp(max=_LARGEST_LOG_RATIO).exp() - 1 - log_ratio_BT
        segments = {
            name: SegmentStatistics(mask.sum(), (cut_BT & mask).sum(), (kl_BT * mask).sum(), (advantages * mask).sum())
            for name, mask in masks.items()
        }
    return Objective(-gain, segments)


def truncated_weights(old_log_probs: Tensor, rollout_log_probs: Tensor, threshold: float) -> Tensor:
    """Return the weights ``min(exp(old - rollout), threshold)`` of tokens; padding has arbitrary values.

    Truncated importance sampling (Ionides, 2008): multiplied with the advantages, the weights correct for a rollout
    engine whose log-probabilities differ from the training engine's for the same policy.
    """
    return (old_log_probs - rollout_log_probs).exp().clamp(max=threshold)


def _check(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, masks: SegmentMasks) -> None:
    check_tensor("log_probs", log_probs, "float", "batch", "tokens")
    shape, device = log_probs.shape, log_probs.device
    for name, tensor in (("old_log_probs", old_log_probs), ("advantages", advantages)):
        check_tensor(name, tensor, "float", *shape, device=device)
    for name, mask in masks.items():
        check_tensor(f"masks[{name!r}]", mask, "bool", *shape, device=device)
