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
    dtype: Any = None
    mixed_precision: Any = None  # a field that verl's configuration does not have
    qat: Any = None
    ulysses_sequence_parallel_size: Any = None


@dataclass
class McoreEngineConfig:
    _target_: str = ""
    context_parallel_size: Any = None
    dtype: Any = None
    dynamic_context_parallel: Any = None
    override_transformer_config: Any = None
    pipeline_model_parallel_size: Any = None
    qat: Any = None
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
    kl_loss_coef: Any = None
    kl_loss_type: Any = None
    loss_agg_mode: Any = None
    loss_scale_factor: Any = None
    optim: Any = None
    policy_loss: Any = None
    ppo_epochs: Any = None
    ppo_max_token_len_per_gpu: Any = None
    ppo_micro_batch_size_per_gpu: Any = None
    ppo_mini_batch_size: Any = None
    qat: Any = None
    strategy: Any = None
    use_dynamic_bsz: Any = None
    use_kl_loss: Any = None


@dataclass
class FSDPActorConfig(_ActorConfig):
    fsdp_config: Any = None
    grad_clip: Any = None
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
    dtype: Any = None
    enforce_eager: Any = None
    engine_kwargs: Any = None
    full_determinism: Any = None
    gpu_memory_utilization: Any = None
    ignore_eos: Any = None
    load_format: Any = None
    log_prob_micro_batch_size_per_gpu: Any = None
    log_prob_use_dynamic_bsz: Any = None
    logprobs_mode: Any = None
    max_model_len: Any = None
    max_num_batched_tokens: Any = None
    max_num_seqs: Any = None
    mode: Any = None
    multi_turn: Any = None
    n: Any = None
    n_gpus_per_node: Any = None
    name: Any = None
    nnodes: Any = None
    over_sample_rate: Any = None
    prompt_length: Any = None
    quantization: Any = None
    quantization_config_file: Any = None
    repetition_penalty: Any = None
    response_length: Any = None
    temperature: Any = None
    tensor_model_parallel_size: Any = None
    top_k: Any = None
    top_p: Any = None
    val_kwargs: Any = None

    def __post_init__(self) -> None:
        if self.mode == "sync":
            raise ValueError("Rollout mode 'sync' has been removed")
