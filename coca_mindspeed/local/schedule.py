"""Functions of the step alone: questions, random seeds, learning rate.  A resumed run needs no state for them."""

import hashlib
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from coca_mindspeed.config.schema import OptimizerConfig
from coca_mindspeed.data.records import Record

if TYPE_CHECKING:
    import torch


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
    return _asked(records, step * count, (step + 1) * count, seed, "order")


def split_records_of_step(
    parts: tuple[Sequence[Record], Sequence[Record]], step: int, count: int, seed: int
) -> tuple[list[Record], list[bool]]:
    """The ``count`` questions of a step, and which of them are reserved for the confidence.

    Both ``parts``, the second of which is reserved, are drawn in proportion to their sizes, epoch after epoch.
    """
    share = len(parts[1]) / (len(parts[0]) + len(parts[1]))
    first, last = (math.floor(done * count * share + 0.5) for done in (step, step + 1))
    answers = _asked(parts[0], step * count - first, (step + 1) * count - last, seed, "order")
    reserved = _asked(parts[1], first, last, seed, "order of reserved")
    return answers + reserved, [False] * len(answers) + [True] * len(reserved)


def _asked(records: Sequence[Record], start: int, stop: int, seed: int, purpose: str) -> list[Record]:
    chosen: list[Record] = []
    for position in range(start, stop):
        epoch, index = divmod(position, len(records))
        if not chosen or index == 0:
            order = np.random.default_rng(derived_seed(seed, purpose, epoch)).permutation(len(records))
        chosen.append(records[order[index]])
    return chosen


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
