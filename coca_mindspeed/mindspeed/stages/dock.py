"""Reading and writing MindSpeed-RL's transfer dock, whole columns at a time.

MindSpeed-RL pads and cuts row by row; for columns of one number that takes longer than the stage itself.
"""

import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from coca_mindspeed.errors import TrainingError
from coca_mindspeed.scoring.rollout import SCORE_COLUMNS, Scored

# Columns that this project adds.  A row is one response, a one-dimensional tensor; the dock turns int64 into int32.
#: Names of the columns of :data:`SCORE_COLUMNS`, which the reward stage writes beside MindSpeed-RL's ``rm_scores``.
SCORES = {name: f"coca_{name}" for name in SCORE_COLUMNS}
SEGMENT_ENDS = SCORES["segment_ends"]
ROLLOUT_LOG_PROBS = "coca_rollout_log_probs"  # float32 [response tokens]

_LENGTHS = "original_length"
_POLL_SECONDS = 0.05


def packed(columns: Mapping[str, Tensor | Sequence[Tensor]]) -> Any:
    """Pack columns, each a matrix or a list of rows, as MindSpeed-RL's ``padding_dict_to_tensor_dict`` does.

    Returns:
        a ``TensorDict``: each column zero-padded on the right, ``[rows, longest]``, and ``original_length``, int64, the
        rows' lengths column after column.
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
    """The rows of each column on the CPU, as by MindSpeed-RL's ``remove_padding_tensor_dict_to_dict``.

    ``batch`` is made by :func:`packed`, or None for no rows; anything else is returned unchanged.
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


def score_columns(scored: Scored) -> dict[str, Tensor]:
    """The columns of scored responses that :meth:`Rows.scores` reads.

    Confidences stay float64: through float32, rewards that are equal by definition would differ.
    """
    return {SCORES[name]: column for name, column in scored.columns().items()}


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of the dock: for each column a list of one-dimensional tensors, and the rows' indexes."""

    columns: Mapping[str, list[Tensor]]
    indexes: list[int]

    def scalars(self, column: str) -> Tensor:
        """A column of one value each, ``[rows]``."""
        return torch.stack(list(self.columns[column]))[:, 0]

    def padded(self, column: str) -> Tensor:
        """A column ``[rows, longest]``, zero-padded on the right."""
        return pad_sequence(list(self.columns[column]), batch_first=True)

    def scores(self) -> dict[str, Tensor]:
        """The columns that :meth:`.Scored.from_columns` reads."""
        return {name: torch.stack(list(self.columns[column])) for name, column in SCORES.items()}


def merged(portions: Sequence[Rows]) -> Rows:
    """The rows of several portions in one, in the order of their indexes."""
    rows = {index: (portion, at) for portion in portions for at, index in enumerate(portion.indexes)}
    indexes = sorted(rows)
    places = [rows[index] for index in indexes]
    names = portions[0].columns if portions else ()
    return Rows({name: [portion.columns[name][at] for portion, at in places] for name in names}, indexes)


def fetch(reference: Any, timeout: float | None = None) -> Any:
    """Return the value of a Ray reference; ``TimeoutError`` (a base class of Ray's) after ``timeout`` seconds."""
    import ray

    return ray.get(reference, timeout=timeout)


def report(dock: Any, metrics: Mapping[str, Sequence[float]]) -> None:
    """Add values to the iteration's metrics, which MindSpeed-RL averages and logs."""
    fetch(dock.update_metrics.remote(value={name: list(values) for name, values in metrics.items()}, cumulate=True))


def check_groups(indexes: Sequence[int], group_size: int) -> None:
    """Check that the rows of each group come together and in order; raises ``TrainingError`` naming the first wrong."""
    for position, index in enumerate(indexes):
        start = position - position % group_size
        first = indexes[start] - indexes[start] % group_size
        if index != first + position % group_size:
            raise TrainingError(
                f"a group of responses is broken: at position {position} the dock handed out row {index}, expected row "
                f"{first + position % group_size}; dispatch sizes must be multiples of n_samples_per_prompt "
                f"({group_size})"
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
    """Take a consumer's rows out of the dock until all are taken, ``count`` rows of whole groups at a time.

    Args:
        dock: handle of the dock's actor.
        consumer: MindSpeed-RL's name of the stage.
        columns: a row is handed out once it has all of them.
        count: rows at a time.
        assigned: which rows, ``count`` at a time, where order is guaranteed; None: any that are ready.
        stall_timeout: seconds without a row after which ``TrainingError`` is raised.
    """
    for wanted in itertools.repeat(None) if assigned is None else assigned:
        waiting_since = time.monotonic()
        while True:
            if wanted is None and fetch(dock.all_consumed.remote(consumer)):
                return  # here, or by another node's stage
            reply = dock.get_experience.remote(
                consumer, list(columns), count, indexes=None if wanted is None else list(wanted), get_n_samples=True
            )
            remaining = stall_timeout - (time.monotonic() - waiting_since)
            batch, indexes = _fetch_rows(reply, consumer, columns, max(0.0, remaining), stall_timeout)
            if indexes:
                yield Rows(unpacked(batch), list(indexes))
                break
            if remaining <= 0:
                raise _stalled(consumer, columns, stall_timeout)
            time.sleep(_POLL_SECONDS)


def read_rows(
    dock: Any, columns: Sequence[str], indexes: Sequence[int], *, stall_timeout: float
) -> dict[str, list[Tensor]]:
    """Read rows without taking them from any stage; raises ``TrainingError`` after ``stall_timeout`` seconds."""
    reply = dock.get_experience.remote("trainer", list(columns), len(indexes), indexes=list(indexes))
    batch, _ = _fetch_rows(reply, "trainer", columns, stall_timeout, stall_timeout)
    rows: dict[str, list[Tensor]] = unpacked(batch)
    return rows


def put(dock: Any, columns: Mapping[str, Tensor | Sequence[Tensor]], indexes: Sequence[int]) -> None:
    """Write columns, each a matrix or one 1-D tensor per row, and wait until they are there."""
    fetch(dock.put_experience.remote(data_dict=packed(columns), indexes=list(indexes)))


def _fetch_rows(reply: Any, consumer: str, columns: Sequence[str], timeout: float, stall_timeout: float) -> Any:
    try:
        return fetch(reply, timeout=timeout)
    except TimeoutError as error:
        raise _stalled(consumer, columns, stall_timeout) from error


def _stalled(consumer: str, columns: Sequence[str], seconds: float) -> TrainingError:
    return TrainingError(
        f"stage {consumer!r} has waited {seconds:.0f} s for the columns {', '.join(columns)}: the stage that writes "
        "them has died or is slower than coca.stall_timeout allows"
    )
