"""A different random seed for every iteration, dispatch and rollout engine.

vLLM seeds all generators with the engine's seed (0 by default) when its KV cache is initialised, and MindSpeed-RL
initialises the cache anew for every rollout.  Without this module all engines would draw the same random numbers in
every iteration, and the first tokens, the stated confidences, would be most affected.
"""

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from coca_mindspeed.errors import TrainingError


@dataclass(slots=True)
class RolloutCount:
    """The next rollout of one worker: rollouts begun (``dispatch``) after a number of finished iterations.

    A validation has the number of the following iteration.
    """

    run_seed: int
    iteration: int
    dispatch: int = 0


def rollout_seed(run_seed: int, iteration: int, dispatch: int, engine: int) -> int:
    """Seed of one rollout, in ``[0, 2**32)``; ``engine`` is a number that only the ranks of one engine share."""
    return int(np.random.SeedSequence((run_seed, iteration, dispatch, engine)).generate_state(1)[0])


def next_seed(engine: Any, first_rank: int) -> int:
    """Seed of the rollout that begins now on an engine counted by :func:`count_rollouts`.

    ``first_rank`` is the first global rank of the engine's tensor-parallel group.
    """
    count: RolloutCount | None = getattr(engine, "coca_rollouts", None)
    if count is None:
        raise TrainingError("a rollout began before its iteration was told; is the actor's generate_sequences hooked?")
    seed = rollout_seed(count.run_seed, count.iteration, count.dispatch, first_rank)
    count.dispatch += 1
    return seed


def count_rollouts(original: Any) -> Any:
    """Wrap ``ActorHybridWorkerBase.generate_sequences``: tell the rollout engine the iteration."""

    def generate_sequences(self: Any) -> None:
        engine = self.actor_hybrid.inference_actor
        count: RolloutCount | None = getattr(engine, "coca_rollouts", None)
        if count is None or count.iteration != self.iteration:
            engine.coca_rollouts = RolloutCount(int(self.megatron_config.seed), int(self.iteration))
        original(self)

    return generate_sequences


def seed_rollout(original: Any) -> Any:
    """Wrap ``VLLMInferEngine.init_cache_engine``, the start of a rollout: seed the device's generator again."""

    @functools.wraps(original)
    def init_cache_engine(self: Any) -> None:
        original(self)
        from vllm.distributed.parallel_state import get_tp_group

        # Ranks of one engine must draw alike.  Only the device's generator, from which vLLM samples: the CPU's
        # shuffles minibatches in training, and must be the same on the ranks of all engines.
        device: Any = getattr(torch, "npu")  # noqa: B009  added by torch_npu
        device.manual_seed(next_seed(self, int(get_tp_group().first_rank)))

    return init_cache_engine
