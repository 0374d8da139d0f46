"""Tokens drawn from rows of a distribution."""

import torch
from torch import Tensor

# From this vocabulary on, an exponential for each token, which torch.multinomial draws, is what sampling on a CPU
# spends most of its time on besides the model.
_LARGE = 4096
_BLOCK = 256  # tokens; one is found in two steps, among the blocks and in its block


def draw_tokens(
    probabilities: Tensor, generator: torch.Generator | None = None, row_of: Tensor | None = None
) -> Tensor:
    """Tokens ``[draws, 1]`` by probabilities ``[rows, vocabulary]``; never one whose probability is 0.

    Args:
        probabilities: they need not add up to 1.
        generator: on their device.
        row_of: int64 ``[draws]``, the row that each draw is made from; None: one from each row.

    Raises:
        RuntimeError: probabilities are not finite, or a row has none.
    """
    if row_of is None:
        row_of = torch.arange(len(probabilities), device=probabilities.device)
    if probabilities.shape[1] < _LARGE:
        return torch.multinomial(probabilities.index_select(0, row_of), 1, generator=generator)
    blocks = _block_sums(probabilities).index_select(0, row_of)
    # Two numbers: the digits of one would not reach to the tokens of a block that is improbable.
    uniform = torch.rand(len(row_of), 2, generator=generator, device=probabilities.device)
    block = _draw(blocks, uniform[:, :1])
    token = block * _BLOCK + torch.arange(_BLOCK, device=probabilities.device)
    inside = token < probabilities.shape[1]
    of_block = probabilities[row_of[:, None], token.where(inside, 0)].where(inside, 0.0)
    return token.gather(1, _draw(of_block, uniform[:, 1:]))


def _block_sums(probabilities: Tensor) -> Tensor:
    """Sums ``[rows, blocks]`` of so many neighbours; the last block may have fewer."""
    whole = probabilities.shape[1] // _BLOCK * _BLOCK
    sums: Tensor = probabilities[:, :whole].unflatten(1, (-1, _BLOCK)).sum(dim=-1)
    if whole == probabilities.shape[1]:
        return sums
    return torch.cat([sums, probabilities[:, whole:].sum(dim=-1, keepdim=True)], dim=1)


def _draw(weights: Tensor, uniform: Tensor) -> Tensor:
    """The index ``[rows, 1]`` at which the sum of weights ``[rows, n]`` passes a uniform share ``[rows, 1]`` of all."""
    reached = weights.cumsum(dim=1)
    total = reached[:, -1:].contiguous()
    if bool((~(total > 0)).any()):
        raise RuntimeError("tokens cannot be drawn: a row of probabilities is 0 throughout, or not finite")
    # A share that was rounded up to all of it must not end behind the last index that has a weight.
    last = torch.searchsorted(reached, total)
    return torch.searchsorted(reached, uniform * total, right=True).minimum(last)
