"""Where tokens come from another engine than the policy: how far the two disagree, and weights that make up for it.

The same weights give other probabilities in another engine (kernels, dtypes, the order of sums), so tokens come from
``mu`` where the objective takes them to come from ``pi_old``.  A token's importance weight ``pi_old / mu`` corrects its
term; it is truncated, as its variance has no bound (Ionides, 2008; for this use Yao et al., 2025).
"""

from typing import NamedTuple

import torch
from torch import Tensor

# exp(60) is 1e26: a gap that large is shown as it is and still has a finite mean.
_LARGEST_LOG_RATIO = 60.0


class EngineGap(NamedTuple):
    """How far the policy's log-probs are from those of the engine that sampled; over tokens.

    Attributes:
        mean: of the absolute differences, in nats.
        largest: of the absolute differences.
        ratio: mean of ``pi_old / mu``; 1 in expectation, whatever the gap.
        kl: k3 estimate of KL(mu || pi_old) (Schulman, 2020).
    """

    mean: float
    largest: float
    ratio: float
    kl: float


def engine_gap(old_log_probs: Tensor, engine_log_probs: Tensor, inside: Tensor) -> EngineGap:
    """Compare two engines on what one of them has sampled; computed in float64.

    Args:
        old_log_probs: float ``[batch, tokens]`` under the policy.
        engine_log_probs: float ``[batch, tokens]`` under the engine that sampled; anything on padding.
        inside: bool ``[batch, tokens]``, True on a response's tokens.

    Raises:
        ValueError: mismatching shapes, or no token at all.
    """
    log_ratio = _log_ratio(old_log_probs, engine_log_probs, inside).double()[inside]
    if not len(log_ratio):
        raise ValueError("inside is False everywhere: there is no token to compare")
    ratio = log_ratio.clamp(max=_LARGEST_LOG_RATIO).exp()
    size = log_ratio.abs()
    return EngineGap(float(size.mean()), float(size.max()), float(ratio.mean()), float((ratio - 1 - log_ratio).mean()))


def truncated_importance(old_log_probs: Tensor, engine_log_probs: Tensor, inside: Tensor, cap: float) -> Tensor:
    """Each token's ``min(pi_old / mu, cap)``, ``[batch, tokens]``; 1 on padding, and without gradient.

    Args:
        old_log_probs: float ``[batch, tokens]`` under the policy before its update.
        engine_log_probs: float ``[batch, tokens]`` under the engine that sampled; anything on padding.
        inside: bool ``[batch, tokens]``, True on a response's tokens.
        cap: the largest weight, at least 1.

    Raises:
        ValueError: mismatching shapes, or a cap below 1.
    """
    if not cap >= 1:
        raise ValueError(f"cap should be at least 1, found {cap}")
    log_ratio = _log_ratio(old_log_probs, engine_log_probs, inside).detach()
    return log_ratio.exp().clamp(max=cap)  # what overflows in exp is above every cap


def _log_ratio(old_log_probs: Tensor, engine_log_probs: Tensor, inside: Tensor) -> Tensor:
    """``log(pi_old / mu)``, 0 on padding."""
    named = {"old_log_probs": old_log_probs, "engine_log_probs": engine_log_probs, "inside": inside}
    for name, tensor in named.items():
        if tensor.dim() != 2 or tensor.shape != inside.shape:
            raise ValueError(f"{name} should be [batch, tokens] {tuple(inside.shape)}, found {tuple(tensor.shape)}")
    return torch.where(inside, old_log_probs - engine_log_probs, 0.0)
