"""The noise that responses are drawn with: another in every iteration, dispatch and engine.

vLLM ends the initialisation of its KV cache by seeding every generator with the engine's own seed, which is 0 where
none is set, and MindSpeed-RL initialises that cache anew for every rollout.  Left to themselves, all engines would
draw the same noise in every iteration, position by position, and most of all in the first tokens, where responses
have not yet gone different ways: in the stated confidences.
"""

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from coca_mindspeed.errors import TrainingError


@dataclass(slots=True)
class RolloutCount:
    """Which rollout comes next on one worker.

    Attributes:
        run_seed: of the run.
        iteration: finished iterations; a validation has the number of the iteration that follows it.
        dispatch: rollouts begun since the iteration changed.
    """

    run_seed: int
    iteration: int
    dispatch: int = 0


def rollout_seed(run_seed: int, iteration: int, dispatch: int, engine: int) -> int:
    """Seed of one rollout, from 0 to 2**32 - 1, NumPy's largest.

    Args:
        run_seed: of the run.
        iteration: as in :class:`RolloutCount`.
        dispatch: as in :class:`RolloutCount`.
        engine: any number that the ranks of one engine share and no other engine has.
    """
    return int(np.random.SeedSequence((run_seed, iteration, dispatch, engine)).generate_state(1)[0])


def next_seed(engine: Any, first_rank: int) -> int:
    """Seed of the rollout that ``engine`` begins now.

    Args:
        engine: MindSpeed-RL's rollout engine, numbered by :func:`numbering_rollouts`.
        first_rank: first global rank of the engine's tensor-parallel group.

    Raises:
        TrainingError: nobody told the engine its iteration.
    """
    count: RolloutCount | None = getattr(engine, "coca_rollouts", None)
    if count is None:
        raise TrainingError("a rollout began before its iteration was told; is the actor's generate_sequences hooked?")
    seed = rollout_seed(count.run_seed, count.iteration, count.dispatch, first_rank)
    count.dispatch += 1
    return seed


def numbering_rollouts(original: Any) -> Any:
    """Wrap ``ActorHybridWorkerBase.generate_sequences``: tell the rollout engine the iteration."""

    def generate_sequences(self: Any) -> None:
        engine = self.actor_hybrid.inference_actor
        count: RolloutCount | None = getattr(engine, "coca_rollouts", None)
        if count is None or count.iteration != self.iteration:
            engine.coca_rollouts = RolloutCount(int(self.megatron_config.seed), int(self.iteration))
        original(self)

    return generate_sequences


def with_noise_of_its_own(original: Any) -> Any:
    """Wrap ``VLLMInferEngine.init_cache_engine``, which a rollout begins with: seed anew what it has just seeded."""

    @functools.wraps(original)
    def init_cache_engine(self: Any) -> None:
        original(self)
        from vllm.distributed.parallel_state import get_tp_group

        # Ranks of one engine hold the same logits and must draw alike.  Only the device's generator, from which vLLM
        # samples: what training draws on the CPU, to shuffle minibatches, has to be the same on ranks of all engines.
        device: Any = getattr(torch, "npu")  # noqa: B009  torch_npu puts it there
        device.manual_seed(next_seed(self, int(get_tp_group().first_rank)))

    return init_cache_engine
