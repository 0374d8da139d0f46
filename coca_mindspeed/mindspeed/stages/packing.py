"""The form in which rows travel to the transfer dock and back, made and taken apart a column at a time.

MindSpeed-RL pads and cuts every row by itself, which for rows of a number each takes longer than what the stages
compute.  These do the same for a whole column at once, so that the columns that this project adds cost nothing.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

_LENGTHS = "original_length"


def packed(columns: Mapping[str, Tensor | Sequence[Tensor]]) -> Any:
    """Rows as MindSpeed-RL's ``padding_dict_to_tensor_dict`` packs them.

    Args:
        columns: each a matrix, or a list of rows of any lengths.

    Returns:
        a ``TensorDict``: each column padded with zeros on the right, ``[rows, longest]``, and ``original_length``, the
        rows' lengths, int64, one column behind the other.
    """
    from tensordict import TensorDict

    matrices, lengths = {}, []
    for name, rows in columns.items():
        if isinstance(rows, Tensor):
            matrices[name], column_lengths = rows, [rows.shape[1]] * len(rows)
        else:
            matrices[name], column_lengths = pad_sequence(list(rows), batch_first=True), [len(row) for row in rows]
        lengths += column_lengths
    return TensorDict.from_dict({**matrices, _LENGTHS: torch.tensor(lengths)})


def unpacked(batch: Any) -> Any:
    """The rows of :func:`packed`, as MindSpeed-RL's ``remove_padding_tensor_dict_to_dict`` takes them apart.

    Args:
        batch: what :func:`packed` made; None for no rows; anything else is returned as it is.

    Returns:
        for each column a list of its rows, on the CPU.
    """
    if batch is None:
        return {}
    if _LENGTHS not in batch.keys():  # noqa: SIM118  a TensorDict refuses `in`
        return batch
    lengths = batch[_LENGTHS].tolist()
    columns = [(name, matrix) for name, matrix in batch.items() if name != _LENGTHS]
    rows: dict[str, list[Tensor]] = {}
    for number, (name, matrix) in enumerate(columns):
        width = matrix.shape[1]
        own = lengths[number * len(matrix) : (number + 1) * len(matrix)]
        rows[name] = [
            row if length == width else row[:length] for row, length in zip(matrix.cpu().unbind(), own, strict=True)
        ]
    return rows
