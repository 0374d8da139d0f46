"""Inverse-CDF sampling of tokens, and their log-probs under the distribution that they are drawn from."""

import torch
from torch import Tensor

from coca_mindspeed.errors import TrainingError
from coca_mindspeed.local.lm_head import TokenScores, entropy_of
from coca_mindspeed.local.policy import Policy

_LARGE = 4096  # vocabulary size; larger ones are sampled by blocks, which is faster
_BLOCK = 256  # tokens per block


class NoDistributionError(TrainingError):
    """No token can be drawn: probabilities are not finite or all zero."""


def numbers_per_draw(vocabulary: int) -> int:
    """Uniform numbers that a draw takes: one float32 cannot resolve the tokens of an improbable block."""
    return 1 if vocabulary < _LARGE else 2


def tokens_at(probabilities: Tensor, uniform: Tensor, row_of: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Tokens ``[draws, 1]`` of probabilities ``[rows, vocabulary]`` at ``uniform`` ``[draws, numbers]`` in [0, 1).

    ``row_of`` int64 ``[draws]`` is the row of each draw; None: one draw per row.  Also whether each is valid, bool
    ``[draws, 1]``: probabilities finite and not all 0.  Tokens of probability 0 are never drawn.
    """
    vocabulary = probabilities.shape[1]
    if vocabulary < _LARGE:
        return _inverse_cdf(_running_sums(probabilities), uniform, row_of)
    block, valid = _inverse_cdf(_running_sums(_block_sums(probabilities)), uniform[:, :1], row_of)
    token = block * _BLOCK + torch.arange(_BLOCK, device=probabilities.device)
    behind = token >= vocabulary
    token = token.masked_fill(behind, 0)
    of_row = probabilities.gather(1, token) if row_of is None else probabilities[row_of[:, None], token]
    # A sum over all blocks that is valid has no block whose own is not, and the block drawn is not 0.
    place, _ = _inverse_cdf(_running_sums(of_row.masked_fill(behind, 0.0)), uniform[:, 1:])
    return token.gather(1, place), valid


def check_drawn(valid: Tensor) -> None:
    """Raise NoDistributionError unless all draws are valid."""
    if not bool(valid.all()):
        raise NoDistributionError(
            "no token can be drawn from the policy: its probabilities are not finite or all 0; check the weights for "
            "NaN or inf"
        )


def _block_sums(probabilities: Tensor) -> Tensor:
    """Sums ``[rows, blocks]`` over blocks of tokens; the last block may be shorter."""
    whole = probabilities.shape[1] // _BLOCK * _BLOCK
    sums: Tensor = probabilities[:, :whole].unflatten(1, (-1, _BLOCK)).sum(dim=-1)
    if whole == probabilities.shape[1]:
        return sums
    return torch.cat([sums, probabilities[:, whole:].sum(dim=-1, keepdim=True)], dim=1)


def _running_sums(weights: Tensor) -> Tensor:
    """Cumulative sums ``[rows, n]``, constant where a weight is 0.

    A GPU scans a single row by another kernel, which does not guarantee this, so a second row is added.
    """
    if len(weights) == 1 and weights.device.type != "cpu":
        return weights.expand(2, -1).cumsum(dim=1)[:1]
    return weights.cumsum(dim=1)


def _inverse_cdf(sums: Tensor, uniform: Tensor, row_of: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Index ``[draws, 1]`` at which cumulative sums ``[rows, n]`` pass the share ``uniform`` of their total.

    Also whether the sums are those of a distribution, bool ``[draws, 1]``.
    """
    total = sums[:, -1:].contiguous()
    valid = (total > 0) & total.isfinite()
    # A share rounded up to 1 must not end behind the last index with a weight.
    last = torch.searchsorted(sums, total).clamp(max=sums.shape[1] - 1)
    if row_of is not None:
        sums, total, last, valid = (of_row.index_select(0, row_of) for of_row in (sums, total, last, valid))
    return torch.searchsorted(sums, uniform * total, right=True).minimum(last), valid


def draw(
    policy: Policy,
    logits: Tensor,
    temperature: float,
    generator: torch.Generator | None = None,
    row_of: Tensor | None = None,
) -> tuple[Tensor, TokenScores]:
    """Sample one token ``[responses, 1]`` per response; also return its log-prob and the distribution's entropy.

    ``row_of`` int64 ``[responses]`` is the row of each response in the logits ``[rows, vocabulary]``; None: one per
    row.
    """
    draws = len(logits if row_of is None else row_of)
    uniform = torch.rand(draws, numbers_per_draw(logits.shape[1]), generator=generator, device=logits.device)
    token, scores, valid = draw_at(policy, logits, temperature, uniform, row_of)
    check_drawn(valid)
    return token, scores


def draw_at(
    policy: Policy, logits: Tensor, temperature: float, uniform: Tensor, row_of: Tensor | None = None
) -> tuple[Tensor, TokenScores, Tensor]:
    """As :func:`draw`, at ``uniform`` numbers as for :func:`tokens_at`; also whether the tokens are valid."""
    distribution = policy.sampling_logits(logits, temperature).log_softmax(dim=-1)
    probabilities = distribution.exp()
    token, valid = tokens_at(probabilities, uniform, row_of)
    if row_of is None:
        log_probs, entropy = distribution.gather(1, token), entropy_of(distribution, probabilities)
    else:
        log_probs, entropy = distribution[row_of[:, None], token], entropy_of(distribution, probabilities)[row_of]
    return token, TokenScores(log_probs, entropy), valid
