"""Responses of a group that have said the same so far are one row of the decoder, until they part.

A confidence before the answer makes beginnings alike: the tag, a zero, a point and often a digit are a third of a short
response.
"""

from typing import NamedTuple

import torch
from torch import Tensor

_SHRINK_AT = 0.9  # of the rows: so few in use, and the others leave; each time copies the cache
_MORE_THAN_A_VOCABULARY = 2**32


class NextStep(NamedTuple):
    """What the decoder should do with its rows, and what to give them.

    Attributes:
        keep: int64, go on with these rows alone, a row as often as it is named; None: with all.
        repeat: int64, put these rows behind the others once more; None: none.  One of the two at most.
        token: int64 ``[rows, 1]``, the next token of each row.
    """

    keep: Tensor | None
    repeat: Tensor | None
    token: Tensor


class Branches:
    """Which row of a decoder each unfinished response goes on from.

    Attributes:
        row_of: int64 ``[responses]``, the decoder's row of each response that goes on.
    """

    def __init__(self, prompts: int, group_size: int, device: torch.device) -> None:
        """All responses to a prompt begin in its row."""
        self.row_of = torch.arange(prompts, device=device).repeat_interleave(group_size)
        self._rows = prompts

    def go_on(self, going: Tensor, token: Tensor) -> NextStep:
        """Follow the responses by a token each.

        Args:
            going: bool ``[responses]``, those that go on; the others are forgotten.
            token: int64 ``[responses, 1]``, what each has sampled.
        """
        pairs = self.row_of[going] * _MORE_THAN_A_VOCABULARY + token[going, 0]
        pairs, pair_of = torch.unique(pairs, return_inverse=True)
        row, token = pairs // _MORE_THAN_A_VOCABULARY, pairs % _MORE_THAN_A_VOCABULARY
        # The first to leave a row in some direction takes it along, the others need a copy.
        another = torch.zeros_like(row, dtype=torch.bool)
        another[1:] = row[1:] == row[:-1]
        repeat = row[another]
        rows = self._rows + len(repeat)
        if len(row) <= _SHRINK_AT * rows:
            self.row_of, self._rows = pair_of, len(row)
            return NextStep(row, None, token[:, None])
        row[another] = torch.arange(self._rows, rows, device=row.device)
        self.row_of, self._rows = row[pair_of], rows
        tokens = token.new_zeros(rows, 1)  # any token does for a row whose responses have ended
        tokens[row, 0] = token
        return NextStep(None, repeat if len(repeat) else None, tokens)
