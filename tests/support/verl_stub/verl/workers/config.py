"""Dataclasses of the sections of ``trainer/config``, with the fields that tests need and one of verl's refusals.

``tests/integration/verl`` compares their fields with verl's.
"""

from dataclasses import dataclass
from typing import Any


@dataclass
class PolicyLossConfig:
    _target_: str = ""
    loss_mode: Any = None


@dataclass
class FSDPEngineConfig:
    _target_: str = ""
    mixed_precision: Any = None  # a field that verl's configuration does not have
    ulysses_sequence_parallel_size: Any = None


@dataclass
class McoreEngineConfig:
    _target_: str = ""
    context_parallel_size: Any = None
    dynamic_context_parallel: Any = None
    override_transformer_config: Any = None
    pipeline_model_parallel_size: Any = None
    tensor_model_parallel_size: Any = None


@dataclass
class _ActorConfig:
    _target_: str = ""
    checkpoint: Any = None
    clip_ratio: Any = None
    clip_ratio_c: Any = None
    clip_ratio_high: Any = None
    clip_ratio_low: Any = None
    entropy_coeff: Any = None
    loss_agg_mode: Any = None
    loss_scale_factor: Any = None
    optim: Any = None
    policy_loss: Any = None
    ppo_epochs: Any = None
    ppo_max_token_len_per_gpu: Any = None
    ppo_micro_batch_size_per_gpu: Any = None
    ppo_mini_batch_size: Any = None
    strategy: Any = None
    use_dynamic_bsz: Any = None
    use_kl_loss: Any = None


@dataclass
class FSDPActorConfig(_ActorConfig):
    fsdp_config: Any = None
    ulysses_sequence_parallel_size: Any = None


@dataclass
class McoreActorConfig(_ActorConfig):
    megatron: Any = None


@dataclass
class RolloutConfig:
    _target_: str = ""
    agent: Any = None
    calculate_log_probs: Any = None
    checkpoint_engine: Any = None
    do_sample: Any = None
    enforce_eager: Any = None
    engine_kwargs: Any = None
    gpu_memory_utilization: Any = None
    ignore_eos: Any = None
    log_prob_micro_batch_size_per_gpu: Any = None
    log_prob_use_dynamic_bsz: Any = None
    mode: Any = None
    multi_turn: Any = None
    n: Any = None
    n_gpus_per_node: Any = None
    name: Any = None
    nnodes: Any = None
    over_sample_rate: Any = None
    temperature: Any = None
    tensor_model_parallel_size: Any = None
    top_k: Any = None
    top_p: Any = None
    val_kwargs: Any = None

    def __post_init__(self) -> None:
        if self.mode == "sync":
            raise ValueError("Rollout mode 'sync' has been removed")
