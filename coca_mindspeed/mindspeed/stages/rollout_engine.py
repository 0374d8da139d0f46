"""Hooks of MindSpeed-RL's rollout engine: fixes that take effect only on an NPU, random seeds, and Llama 3.

vLLM seeds all generators with the engine's seed (0 by default) when its KV cache is initialised, and MindSpeed-RL
initialises the cache anew for every rollout.  Without :func:`seed_rollout` all engines would draw the same random
numbers in every iteration, and the first tokens, the stated confidences, would be most affected.

Releases 2.3.0 and master have no weight adaptor for ``LlamaForCausalLM``, and their loader for it skips ``lm_head``
although Llama 3 does not tie it to the embedding.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from coca_mindspeed.errors import TrainingError


def onload_training_weights(original: Any) -> Any:
    """Wrap ``MegatronShardingManager.enter_infer_mode``: onload the training weights before they are read.

    MindSpeed-RL offloads them at the end of this method and onloads them only for the forward pass and the update, so
    a second rollout in a row, as in a validation, would read freed weights.
    """

    def enter_infer_mode(self: Any) -> None:
        if self.train_param_offload and not getattr(self, "share_backbone", False):
            self.megatron_offloader.onload_param()  # a no-op if they are there
        original(self)

    return enter_infer_mode


def prompts_as_token_ids(_original: Any) -> Any:
    """Replace ``VLLMInferEngine.generate_sequences`` of MindSpeed-RL's master.

    Upstream decodes prompts to text without special tokens, which removes the chat template: responses would be
    sampled from another prompt than the one they are trained on.
    """

    @torch.no_grad()
    def generate_sequences(self: Any, idx_list: Sequence[Sequence[int]], **kwargs: Any) -> Any:
        self.init_cache_engine()
        with self.update_sampling_params(**kwargs):
            prompts = [{"prompt_token_ids": [int(token) for token in ids]} for ids in idx_list]
            answered = self.llm.generate(prompts=prompts, sampling_params=self.sampling_params, use_tqdm=False)
            sampled = self._post_process_outputs(answered)
        self.free_cache_engine()
        return sampled

    return generate_sequences


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


def weight_adaptor(model_config: Any) -> Any:
    """MindSpeed-RL's general adaptor; it has Llama's parameter names."""
    from mindspeed_rl.workers.resharding.weight_adaptor import MegatronVLLMWeightAdaptor

    return MegatronVLLMWeightAdaptor(model_config)


def load_weights(actor_weights: Any, vllm_model: Any, parallel: Any, hf_config: Any) -> Any:
    """MindSpeed-RL's loader for Qwen 2.5, which loads every parameter of vLLM's model."""
    from mindspeed_rl.models.rollout.vllm_adapter.megatron_weight_loaders import qwen_megatron_weight_loader

    return qwen_megatron_weight_loader(actor_weights, vllm_model, parallel, hf_config)
