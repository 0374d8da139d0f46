"""The form in which rows travel to the transfer dock and back, made and taken apart a column at a time.

MindSpeed-RL pads and cuts every row by itself, which for rows of a number each takes longer than what the stages
compute.  These do the same for a whole column at once, so that the columns that this project adds cost nothing.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from coca_mindspeed.errors import TrainingError

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


_POLL_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of the dock: for each column a list of one-dimensional tensors, and the rows' indexes."""

    columns: Mapping[str, list[Tensor]]
    indexes: list[int]

    def scalars(self, column: str) -> Tensor:
        """A column of one value each, ``[rows]``."""
        return torch.stack(list(self.columns[column]))[:, 0]

    def padded(self, column: str) -> Tensor:
        """A column ``[rows, longest]``, padded with zeros on the right."""
        return torch.nn.utils.rnn.pad_sequence(list(self.columns[column]), batch_first=True)


def fetch(reference: Any, timeout: float | None = None) -> Any:
    """The value behind a Ray reference.

    Raises:
        TimeoutError: it is not there after ``timeout`` seconds (Ray's own error is a subclass).
    """
    import ray

    return ray.get(reference, timeout=timeout)


def report(dock: Any, metrics: Mapping[str, Sequence[float]]) -> None:
    """Add values to the iteration's metrics, which MindSpeed-RL averages and logs."""
    fetch(dock.update_metrics.remote(value={name: list(values) for name, values in metrics.items()}, cumulate=True))


def check_groups(indexes: Sequence[int], group_size: int) -> None:
    """Rows of a group must come together and in order, as the group-relative rewards assume.

    Raises:
        TrainingError: naming the first row that breaks a group.
    """
    for position, index in enumerate(indexes):
        start = position - position % group_size
        if indexes[start] % group_size or index != indexes[start] + position % group_size:
            raise TrainingError(
                f"a group of responses is broken: at position {position} the dock handed out row {index}, expected row "
                f"{indexes[start] - indexes[start] % group_size + position % group_size}; dispatch sizes must be "
                f"multiples of n_samples_per_prompt ({group_size})"
            )
    if len(indexes) % group_size:
        raise TrainingError(f"{len(indexes)} rows are not whole groups of {group_size}")


def batches(
    dock: Any,
    consumer: str,
    columns: Sequence[str],
    count: int,
    *,
    assigned: Sequence[Sequence[int]] | None,
    stall_timeout: float,
) -> Iterator[Rows]:
    """Take a consumer's rows out of the dock until all are taken, whole groups at a time.

    Args:
        dock: handle of the dock's actor.
        consumer: MindSpeed-RL's name of the stage.
        columns: wanted; a row is handed out once all of them are there.
        count: rows at a time.
        assigned: the rows in order, ``count`` at a time, where order is guaranteed; else None: any that are ready.
        stall_timeout: seconds without a row after which the stage gives up.

    Raises:
        TrainingError: nothing became ready for ``stall_timeout`` seconds, so that an upstream stage must have died.
    """
    for wanted in assigned if assigned is not None else _until_consumed(dock, consumer):
        waiting_since = time.monotonic()
        while True:
            reply = dock.get_experience.remote(
                consumer, list(columns), count, indexes=None if wanted is None else list(wanted), get_n_samples=True
            )
            remaining = stall_timeout - (time.monotonic() - waiting_since)
            try:
                batch, indexes = fetch(reply, timeout=max(0.0, remaining))
            except TimeoutError as error:
                raise _stalled(consumer, columns, stall_timeout) from error
            if indexes:
                yield Rows(unpacked(batch), list(indexes))
                break
            if wanted is None and _consumed(dock, consumer):
                return  # another node's stage took the rest
            if remaining <= 0:
                raise _stalled(consumer, columns, stall_timeout)
            time.sleep(_POLL_SECONDS)


def put(dock: Any, columns: Mapping[str, Tensor | Sequence[Tensor]], indexes: Sequence[int]) -> None:
    """Write columns, each a matrix or one tensor of one dimension a row, and wait until they are there."""
    fetch(dock.put_experience.remote(data_dict=packed(columns), indexes=list(indexes)))


def _until_consumed(dock: Any, consumer: str) -> Iterator[None]:
    while not _consumed(dock, consumer):
        yield None


def _consumed(dock: Any, consumer: str) -> bool:
    return bool(fetch(dock.all_consumed.remote(consumer)))


def _stalled(consumer: str, columns: Sequence[str], seconds: float) -> TrainingError:
    return TrainingError(
        f"stage {consumer!r} has waited {seconds:.0f} s for the columns {', '.join(columns)}: the stage that writes "
        "them has died or is slower than coca.stall_timeout allows"
    )


def read_rows(
    dock: Any, columns: Sequence[str], indexes: Sequence[int], *, stall_timeout: float
) -> dict[str, list[Tensor]]:
    """Read rows without taking them from any stage; waits for those that are not there yet.

    Raises:
        TrainingError: they were not there after ``stall_timeout`` seconds.
    """
    reply = dock.get_experience.remote("trainer", list(columns), len(indexes), indexes=list(indexes))
    try:
        batch, _ = fetch(reply, timeout=stall_timeout)
    except TimeoutError as error:
        raise _stalled("trainer", columns, stall_timeout) from error
    rows: dict[str, list[Tensor]] = unpacked(batch)
    return rows
