"""Tokens drawn from rows of a distribution, by where a uniform number falls among its sums.

`torch.multinomial` draws an exponential for each token of a vocabulary: of a large one, what sampling on a CPU spends
most of its time on besides the model.
"""

import torch
from torch import Tensor

from coca_mindspeed.errors import TrainingError

_LARGE = 4096  # a vocabulary from here on: summed up whole for every draw it would take longer than by blocks
_BLOCK = 256  # tokens; one is found in two steps, among the blocks and in its block


class NoDistributionError(TrainingError):
    """No token can be drawn: probabilities are not finite, or all of them are 0."""


def draw_tokens(
    probabilities: Tensor, generator: torch.Generator | None = None, row_of: Tensor | None = None
) -> Tensor:
    """Tokens ``[draws, 1]`` by probabilities ``[rows, vocabulary]``; never one whose probability is 0.

    Args:
        probabilities: they need not add up to 1.
        generator: on their device.
        row_of: int64 ``[draws]``, the row that each draw is made from; None: one from each row.

    Raises:
        NoDistributionError: probabilities are not finite, or a row has none.
    """
    if row_of is None:
        row_of = torch.arange(len(probabilities), device=probabilities.device)
    if probabilities.shape[1] < _LARGE:
        uniform = torch.rand(len(row_of), 1, generator=generator, device=probabilities.device)
        return _draw(_running_sums(probabilities), uniform, row_of)
    blocks = _running_sums(_block_sums(probabilities))
    # Two numbers: the digits of one would not reach to the tokens of a block that is improbable.
    uniform = torch.rand(len(row_of), 2, generator=generator, device=probabilities.device)
    block = _draw(blocks, uniform[:, :1], row_of)
    token = block * _BLOCK + torch.arange(_BLOCK, device=probabilities.device)
    inside = token < probabilities.shape[1]
    of_block = probabilities[row_of[:, None], token.where(inside, 0)].where(inside, 0.0)
    return token.gather(1, _draw(_running_sums(of_block), uniform[:, 1:]))


def _block_sums(probabilities: Tensor) -> Tensor:
    """Sums ``[rows, blocks]`` of so many neighbours; the last block may have fewer."""
    whole = probabilities.shape[1] // _BLOCK * _BLOCK
    sums: Tensor = probabilities[:, :whole].unflatten(1, (-1, _BLOCK)).sum(dim=-1)
    if whole == probabilities.shape[1]:
        return sums
    return torch.cat([sums, probabilities[:, whole:].sum(dim=-1, keepdim=True)], dim=1)


def _running_sums(weights: Tensor) -> Tensor:
    """Sums ``[rows, n]`` of each weight with those before it; where a weight is 0, the sum stays what it was.

    A GPU scans a single row by another kernel, whose sums may go up and down where nothing is added.
    """
    if len(weights) == 1 and weights.device.type != "cpu":
        return weights.expand(2, -1).cumsum(dim=1)[:1]
    return weights.cumsum(dim=1)


def _draw(sums: Tensor, uniform: Tensor, row_of: Tensor | None = None) -> Tensor:
    """The index ``[draws, 1]`` at which a row of ``sums`` passes a uniform share ``[draws, 1]`` of its last.

    Args:
        sums: of weights ``[rows, n]``, each with those before it.
        uniform: from 0 to 1.
        row_of: as in :func:`draw_tokens`.
    """
    total = sums[:, -1:].contiguous()
    if bool((~((total > 0) & total.isfinite())).any()):
        raise NoDistributionError(
            "no token can be drawn from the policy: its probabilities are not finite, or all 0; are its weights finite?"
        )
    # A share that was rounded up to all of it must not end behind the last index that has a weight.
    last = torch.searchsorted(sums, total)
    if row_of is not None:
        sums, total, last = (of_row.index_select(0, row_of) for of_row in (sums, total, last))
    return torch.searchsorted(sums, uniform * total, right=True).minimum(last)
