"""Functions of the step alone: questions, random seeds, learning rate.  A resumed run needs no state for them."""

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from coca_mindspeed.config.schema import OptimizerConfig
from coca_mindspeed.data.records import Record

if TYPE_CHECKING:
    import torch


#: The questions that the answers learn on, and those that are reserved for the confidence.
Parts = tuple[Sequence[Record], Sequence[Record]]
_ORDERS = ("order", "order of reserved")  # purposes of the random orders of the two parts
_WSD_DECAY = 0.2  # share of the steps over which ``wsd`` decays


def derived_seed(seed: int, *purpose: object) -> int:
    """Return a 63-bit seed for one purpose; seeds of different purposes are independent."""
    digest = hashlib.sha256(repr((seed, *purpose)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def generator(device: "torch.device", seed: int, *purpose: object) -> "torch.Generator":
    """A random generator for one purpose."""
    import torch  # run_directory.py needs the learning rates before torch is imported

    return torch.Generator(device).manual_seed(derived_seed(seed, *purpose))


def records_of_step(records: Sequence[Record], step: int, count: int, seed: int) -> list[Record]:
    """The ``count`` questions of a step (counted from 0): epoch after epoch, each in an order of its own."""
    return _asked(records, step * count, (step + 1) * count, seed, _ORDERS[0])


def split_records_of_step(parts: Parts, step: int, count: int, seed: int) -> tuple[list[Record], list[bool]]:
    """The ``count`` questions of a step, and which of them are reserved for the confidence.

    Both parts are drawn in proportion to their sizes, epoch after epoch.
    """
    answers, reserved = (
        _asked(part, *bounds, seed, order)
        for part, bounds, order in zip(parts, _bounds(parts, step, count), _ORDERS, strict=True)
    )
    return answers + reserved, [False] * len(answers) + [True] * len(reserved)


def _bounds(parts: Parts, step: int, count: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """First and last position, exclusive, of a step in the endless order of each part."""
    share = len(parts[1]) / (len(parts[0]) + len(parts[1]))
    first, last = (math.floor(done * count * share + 0.5) for done in (step, step + 1))
    return (step * count - first, (step + 1) * count - last), (first, last)


def _asked(records: Sequence[Record], start: int, stop: int, seed: int, purpose: str) -> list[Record]:
    chosen: list[Record] = []
    for position in range(start, stop):
        epoch, index = divmod(position, len(records))
        if not chosen or index == 0:
            order = _order(records, epoch, seed, purpose)
        chosen.append(records[order[index]])
    return chosen


def _order(records: Sequence[Record], epoch: int, seed: int, purpose: str) -> NDArray[np.int64]:
    return np.random.default_rng(derived_seed(seed, purpose, epoch)).permutation(len(records))


@dataclass(frozen=True)
class FirstSight:
    """The step (from 0) in which a run first asks each question; records with the same text are one question.

    Attributes:
        steps: question -> step.
        count: questions of a step.
    """

    steps: Mapping[str, int]
    count: int

    @classmethod
    def of(cls, parts: Parts, count: int, seed: int) -> "FirstSight":
        """From the order of :func:`split_records_of_step`, whose first epoch of each part asks everything."""
        steps: dict[str, int] = {}
        orders = [_order(part, 0, seed, purpose) for part, purpose in zip(parts, _ORDERS, strict=True)]
        for step in range(math.ceil((len(parts[0]) + len(parts[1])) / count)):
            for part, order, (start, stop) in zip(parts, orders, _bounds(parts, step, count), strict=True):
                for index in order[start:stop]:
                    steps.setdefault(part[index].question, step)
        return cls(steps, count)

    def seen(self, asked: Sequence[Record], step: int) -> list[bool]:
        """Whether an earlier step than ``step`` asked each question."""
        return [self.steps[record.question] < step for record in asked]

    def times_asked(self, step: int) -> float:
        """How often a question was asked on average, of those asked up to and including ``step``."""
        return (step + 1) * self.count / sum(first <= step for first in self.steps.values())


def learning_rate(config: OptimizerConfig, step: int, steps: int) -> float:
    """Learning rate of a step (counted from 0) of a stage with ``steps`` steps: linear warm-up, then decay to zero."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    done = (step - config.warmup_steps) / max(1, steps - config.warmup_steps)
    if config.schedule == "linear":
        return config.lr * (1 - done)
    if config.schedule == "cosine":
        return config.lr * 0.5 * (1 + math.cos(math.pi * done))
    if config.schedule == "wsd":
        return config.lr * min(1.0, (1 - done) / _WSD_DECAY)
    return config.lr
