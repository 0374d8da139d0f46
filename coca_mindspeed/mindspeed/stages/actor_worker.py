"""Hooks of the actor's worker: no reference model, our columns in its batches, the rollout's log-probabilities kept."""

from collections.abc import Sequence
from typing import Any

import ray
from mindspeed_rl.workers.actor_hybrid_worker import ActorHybridWorkerBase
from torch import Tensor

from coca_mindspeed.errors import ConfigError
from coca_mindspeed.mindspeed.stages.dock import ROLLOUT_LOG_PROBS, SEGMENT_ENDS
from coca_mindspeed.mindspeed.start.process import process_settings

_NPU_SHARE = 0.7  # MindSpeed-RL's: a reference worker has the rest of each NPU


class ActorWithoutReference(ActorHybridWorkerBase):
    """MindSpeed-RL's integrated worker without its reference model."""

    def compute_log_prob(self) -> None:
        """Compute log-probabilities, in microbatches of ``actor_forward_micro_batch_size`` if it is configured."""
        size = self.rl_config.actor_forward_micro_batch_size
        if size is None:
            super().compute_log_prob()
            return
        # At the top of this module it would be a cycle where patches/*.patch are applied.
        from mindspeed_rl.workers.integrated_worker import temporary_micro_batch_size

        with temporary_micro_batch_size(worker=self.actor_hybrid.train_actor, args=self.get_args(), new_mbs=size):
            super().compute_log_prob()


def integrated_worker(original: Any) -> Any:
    """Replace ``IntegratedWorker``, unless there is a KL term."""
    if process_settings().reference:
        return hooked_actor(original)
    return ray.remote(resources={"NPU": _NPU_SHARE})(ActorWithoutReference)


def hooked_actor(original: Any) -> Any:
    """Make MindSpeed-RL's actor class an actor again: Ray had copied its methods before they were hooked."""
    return ray.remote(resources={"NPU": _NPU_SHARE})(original.__ray_actor_class__)


def actor_resource(rl_config: Any) -> Any:
    """Entry of the launcher's table: the part of ``rl_config`` with the actor's NPUs."""
    return rl_config.actor_resource


def training_columns(asked: Sequence[str], *, reference: bool, rollout_log_probs: bool) -> list[str]:
    """Add our columns to the columns of MindSpeed-RL's update, and remove the reference's if there is none."""
    wanted = [column for column in asked if reference or column != "ref_log_prob"]
    return [*wanted, SEGMENT_ENDS, *([ROLLOUT_LOG_PROBS] if rollout_log_probs else [])]


def add_training_columns(original: Any) -> Any:
    """Wrap ``BaseWorker.dispatch_transfer_dock_data``: the update reads our columns."""

    def dispatch_transfer_dock_data(
        self: Any, experience_consumer_stage: str, experience_columns: Sequence[str], *args: Any, **kwargs: Any
    ) -> Any:
        if experience_consumer_stage == "actor_train":
            settings = process_settings()
            experience_columns = training_columns(
                experience_columns, reference=settings.reference, rollout_log_probs=settings.coca.rollout_log_probs
            )
        return original(self, experience_consumer_stage, experience_columns, *args, **kwargs)

    return dispatch_transfer_dock_data


def keep_log_probs(original: Any) -> Any:
    """Wrap ``ActorRolloutHybrid.generate_sequences``, which drops the log-probabilities that the engine returns."""

    def generate_sequences(
        self: Any, prompts_list: list[list[int]], indexes: Any = None, async_engine: bool = False, **kwargs: Any
    ) -> Any:
        if async_engine or not process_settings().coca.rollout_log_probs:
            return original(self, prompts_list, indexes, async_engine, **kwargs)
        token_ids, log_probs = self.inference_actor.generate_sequences(prompts_list, **kwargs)
        self.coca_rollout_log_probs = log_probs
        return token_ids

    return generate_sequences


def write_log_probs(original: Any) -> Any:
    """Wrap ``BaseWorker.collect_transfer_dock_data``: a rollout also writes its log-probabilities."""

    def collect_transfer_dock_data(
        self: Any, output: dict[str, Any], index: Any, use_vllm: bool = False, is_generate: bool = False, **kwargs: Any
    ) -> Any:
        if is_generate and process_settings().coca.rollout_log_probs:
            log_probs = self.actor_hybrid.coca_rollout_log_probs
            output = {**output, ROLLOUT_LOG_PROBS: _cut_to(output["responses"], log_probs)}
        return original(self, output, index, use_vllm=use_vllm, is_generate=is_generate, **kwargs)

    return collect_transfer_dock_data


def _cut_to(responses: Sequence[Tensor], log_probs: Any) -> list[Tensor]:
    """Cut float ``[responses, longest]`` (an empty list if the engine was asked for none) to each response's length."""
    if len(log_probs) != len(responses):
        raise ConfigError(
            f"the rollout engine returned {len(log_probs)} rows of log-probabilities for {len(responses)} responses; "
            "set generate_config.sampling_config.logprobs to 1, or coca.rollout_log_probs to false"
        )
    rows: Tensor = log_probs.float().cpu()  # one copy: on a device each copy is waited for
    return [row[: len(response)] for row, response in zip(rows, responses, strict=True)]
