"""Functions of the step alone: questions, random seeds, learning rate.  A resumed run needs no state for them."""

import hashlib
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from coca_mindspeed.config.schema import OptimizerConfig
from coca_mindspeed.data.order import QuestionOrder
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


def question_order(records: Sequence[Record], count: int, seed: int) -> QuestionOrder:
    """The order of a run's questions, ``count`` in each step."""
    return QuestionOrder(
        records,
        count,
        lambda epoch: np.random.default_rng(derived_seed(seed, "order", epoch)).permutation(len(records)),
    )


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
