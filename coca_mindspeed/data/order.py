"""The questions of each step: a function of seed and step, which a resumed run computes again."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from coca_mindspeed.data.records import Record


@dataclass(frozen=True)
class QuestionOrder:
    """The questions of a run: epoch after epoch, ``count`` in each step.  Steps count from 0.

    Attributes:
        records: the questions, which are known by their texts.
        count: questions of a step; a step may end one epoch and begin the next.
        order_of: the order of an epoch (from 0), a permutation of the indexes of ``records``.
    """

    records: Sequence[Record]
    count: int
    order_of: Callable[[int], NDArray[np.int64]]

    def indexes(self, positions: range) -> NDArray[np.int64]:
        """The indexes of the questions at these positions of the run, int64 ``[len(positions)]``."""
        size = len(self.records)
        first, last = positions.start // size, (positions.stop - 1) // size
        orders = np.concatenate([self.order_of(epoch) for epoch in range(first, last + 1)])
        return orders[positions.start - first * size : positions.stop - first * size]

    def of_step(self, step: int) -> list[Record]:
        """The questions of a step."""
        return [self.records[index] for index in self.indexes(range(step * self.count, (step + 1) * self.count))]

    def seen(self, step: int) -> list[bool]:
        """Whether an earlier step asked each question of ``step``."""
        return [self._first_step[record.question] < step for record in self.of_step(step)]

    def times_asked(self, step: int) -> float:
        """How often a question was asked on average, of those asked up to and including ``step``."""
        return (step + 1) * self.count / sum(first <= step for first in self._first_step.values())

    @cached_property
    def _first_step(self) -> dict[str, int]:
        """The step that first asks each question: all are asked in the first epoch."""
        steps: dict[str, int] = {}
        for position, index in enumerate(self.order_of(0)):
            steps.setdefault(self.records[index].question, position // self.count)
        return steps
