"""What decides whether a run can run on a cluster: one flat record, read from the typed sections and MindSpeed-RL's.

Defaults are those of MindSpeed-RL's config classes, for a key that a YAML file leaves out has that value there.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from coca_mindspeed.config.schema import RunConfig
from coca_mindspeed.errors import ConfigError

_ACTOR = "mindspeed_rl.actor_config"
_TRAINING = "mindspeed_rl.megatron_training"
_RL = "mindspeed_rl.rl_config"
_GENERATE = "mindspeed_rl.generate_config"


@dataclass(frozen=True, slots=True)
class RunFacts:
    """Numbers and switches of one run; sizes in tokens, ``None`` where MindSpeed-RL fills in the value itself."""

    # the machine
    nodes: int
    npus: int
    memory_gib: float
    reserved_gib: float
    # the model
    layers: int
    hidden: int
    heads: int
    kv_groups: int
    ffn: int
    vocab: int
    untied_embeddings: bool
    qkv_bias: bool
    context: int
    # training
    tp: int
    pp: int
    cp: int
    cp_algorithm: str
    micro_batch: int
    seq_length: int
    bf16: bool
    sequence_parallel: bool
    distributed_optimizer: bool
    recompute: str | None
    recompute_method: str | None
    recompute_layers: int | None
    attention_mask: str | None
    reset_attention_mask: bool
    no_pad_to_seq_lengths: bool
    # the batch
    prompts: int
    group: int
    mini_batch: int
    epochs: int
    remove_padding: bool
    dynamic_batch: bool
    update_tokens: int
    logprob_tokens: int
    rollout_dispatch: int | None
    logprob_dispatch: int | None
    update_dispatch: int | None
    advantage_dispatch: int | None
    reward_dispatch: int | None
    kl_coefficient: float
    verifiers: int
    verifier_weights: int
    guarantee_order: bool
    partial_rollout_splits: int
    zmq: bool
    # rollout
    rollout_tp: int
    rollout_pp: int
    max_prompt: int
    max_new: int
    max_model_len: int
    max_batched_tokens: int
    max_sequences: int
    memory_utilization: float
    rollout_dtype: str
    temperature: float
    sampling_seed: int | None
    top_k: int
    top_p: float
    min_p: float
    offload_param: bool
    offload_grad: bool
    offload_optimizer: bool

    @property
    def model_parallel(self) -> int:
        """NPUs that hold one copy of the model in training."""
        return self.tp * self.pp * self.cp

    @property
    def dp(self) -> int:
        """Copies of the model in training."""
        return self.npus // self.model_parallel

    @property
    def rollout_dp(self) -> int:
        """Copies of the model in rollout."""
        return self.npus // (self.rollout_tp * self.rollout_pp)

    @property
    def responses(self) -> int:
        """Responses an iteration."""
        return self.prompts * self.group

    @property
    def engine_responses(self) -> int:
        """Responses that a rollout engine is asked for at once."""
        return self.rollout_dispatch or self.responses // self.rollout_dp

    @property
    def microbatch_tokens(self) -> int:
        """Most tokens that one rank holds activations for."""
        if self.dynamic_batch:
            tokens = math.ceil(_PACKING_EXCESS * max(self.update_tokens, self.seq_length))
        else:
            tokens = self.micro_batch * self.seq_length
        return -(-tokens // self.cp)

    def varied(self, field: str, value: Any) -> "RunFacts":
        """These facts with one field changed, and what is derived from it."""
        changes: dict[str, Any] = {field: value}
        if field == "nodes":
            changes["npus"] = self.npus // self.nodes * value
        if field == "prompts" and self.mini_batch and self.prompts % self.mini_batch == 0:
            changes["mini_batch"] = max(1, value // (self.prompts // self.mini_batch))
        return replace(self, **changes)


#: The key under which a user finds each field, for messages.
KEYS: dict[str, str] = {
    "nodes": "hardware.nodes",
    "npus": f"{_RL}.actor_resource.num_npus",
    "memory_gib": "hardware.memory_gib",
    "tp": f"{_ACTOR}.tensor_model_parallel_size",
    "pp": f"{_ACTOR}.pipeline_model_parallel_size",
    "cp": f"{_ACTOR}.context_parallel_size",
    "micro_batch": f"{_ACTOR}.micro_batch_size",
    "seq_length": f"{_TRAINING}.seq_length",
    "bf16": f"{_TRAINING}.bf16",
    "recompute": f"{_TRAINING}.recompute_granularity",
    "recompute_method": f"{_TRAINING}.recompute_method",
    "recompute_layers": f"{_TRAINING}.recompute_num_layers",
    "attention_mask": f"{_ACTOR}.attention_mask_type",
    "reset_attention_mask": f"{_TRAINING}.reset_attention_mask",
    "no_pad_to_seq_lengths": f"{_TRAINING}.no_pad_to_seq_lengths",
    "prompts": "rollout.prompts",
    "group": "rollout.group_size",
    "mini_batch": f"{_RL}.mini_batch_size",
    "remove_padding": f"{_RL}.use_remove_padding",
    "update_tokens": f"{_RL}.update_max_packing_token_size",
    "logprob_tokens": f"{_RL}.actor_max_packing_token_size",
    "rollout_dispatch": f"{_RL}.actor_rollout_dispatch_size",
    "logprob_dispatch": f"{_RL}.actor_logprob_dispatch_size",
    "update_dispatch": f"{_RL}.actor_update_dispatch_size",
    "advantage_dispatch": f"{_RL}.adv_dispatch_size",
    "reward_dispatch": f"{_RL}.reward_dispatch_size",
    "verifier_weights": f"{_RL}.verifier_weight",
    "partial_rollout_splits": f"{_RL}.partial_rollout_max_split",
    "rollout_tp": f"{_GENERATE}.infer_tensor_parallel_size",
    "rollout_pp": f"{_GENERATE}.infer_pipeline_parallel_size",
    "max_prompt": "rollout.max_prompt_tokens",
    "max_new": "rollout.max_new_tokens",
    "max_model_len": f"{_GENERATE}.max_model_len",
    "max_batched_tokens": f"{_GENERATE}.max_num_batched_tokens",
    "memory_utilization": f"{_GENERATE}.gpu_memory_utilization",
    "rollout_dtype": f"{_GENERATE}.dtype",
    "temperature": f"{_GENERATE}.sampling_config.temperature",
    "sampling_seed": f"{_GENERATE}.sampling_config.seed",
    "top_k": f"{_GENERATE}.sampling_config.top_k",
    "top_p": f"{_GENERATE}.sampling_config.top_p",
    "min_p": f"{_GENERATE}.sampling_config.min_p",
}


# MindSpeed-RL counts the microbatches that hold their limit and then evens them out by another rule (Karmarkar-Karp),
# which keeps to no limit: on lengths as responses have them it went up to 2.5% over it.
_PACKING_EXCESS = 1.025


class _Reader:
    """Values of one of MindSpeed-RL's config classes, each with the class's default and checked for its type."""

    def __init__(self, name: str, *sections: Mapping[str, Any]) -> None:
        self._name = name
        self._values: dict[str, Any] = {}
        for section in sections:
            self._values.update({str(key).replace("-", "_"): value for key, value in section.items()})

    def integer(self, key: str, default: int | None = None) -> int:
        return int(self._value(key, default, "a whole number", lambda value: type(value) is int))

    def optional(self, key: str) -> int | None:
        return None if self._values.get(key) is None else self.integer(key)

    def number(self, key: str, default: float) -> float:
        return float(self._value(key, default, "a finite number", _is_finite))

    def switch(self, key: str, default: bool) -> bool:
        return bool(self._value(key, default, "true or false", lambda value: type(value) is bool))

    def text(self, key: str, default: str | None) -> str | None:
        value = self._value(key, default, "text", lambda value: value is None or isinstance(value, str))
        return None if value is None else str(value)

    def section(self, key: str) -> "_Reader":
        return _Reader(f"{self._name}.{key}", self._values.get(key) or {})

    def length(self, key: str, default: int) -> int:
        value = self._values.get(key)
        return default if value is None else len(value)

    def _value(self, key: str, default: Any, expected: str, holds: Callable[[Any], bool]) -> Any:
        value = self._values.get(key, default)
        if not holds(value):
            raise ConfigError(f"{self._name}.{key}={value!r}: expected {expected}")
        return value


def _is_finite(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def read_facts(run: RunConfig) -> RunFacts:
    """The facts of a run for Ascend.

    Raises:
        ConfigError: it is not one, or a key of MindSpeed-RL's has a value of the wrong type.
    """
    ours, hardware = run.mindspeed_rl, run.hardware
    if hardware.platform == "local" or not ours.get("actor_config"):
        raise ConfigError(
            "this run has no plan for a cluster: hardware.platform is "
            f"{hardware.platform!r}; choose a machine, hardware=ascend_910b or hardware=ascend_910c, and a model for it"
        )
    training_section = ours.get("megatron_training") or {}
    actor_section = ours["actor_config"]
    name = actor_section.get("model", training_section.get("model"))
    model_section = (ours.get("model") or {}).get(name) or {}
    actor = _Reader(_ACTOR, model_section, training_section, actor_section)  # BaseConfig.update: later ones win
    rl = _Reader(_RL, ours.get("rl_config") or {})
    generate = _Reader(_GENERATE, ours.get("generate_config") or {})
    sampling = generate.section("sampling_config")
    packing = rl.integer("max_packing_token_size", 4096)
    return RunFacts(
        nodes=hardware.nodes,
        npus=rl.section("actor_resource").integer("num_npus"),
        memory_gib=hardware.memory_gib,
        reserved_gib=hardware.reserved_gib,
        layers=actor.integer("num_layers"),
        hidden=actor.integer("hidden_size"),
        heads=actor.integer("num_attention_heads"),
        kv_groups=(
            actor.integer("num_query_groups", 1)
            if actor.switch("group_query_attention", False)
            else actor.integer("num_attention_heads")
        ),
        ffn=actor.integer("ffn_hidden_size"),
        vocab=actor.integer("padded_vocab_size"),
        untied_embeddings=actor.switch("untie_embeddings_and_output_weights", False),
        qkv_bias=actor.switch("add_qkv_bias", False),
        context=actor.integer("max_position_embeddings"),
        tp=actor.integer("tensor_model_parallel_size", 1),
        pp=actor.integer("pipeline_model_parallel_size", 1),
        cp=actor.integer("context_parallel_size", 1),
        cp_algorithm=str(actor.text("context_parallel_algo", "ulysses_cp_algo")),
        micro_batch=actor.integer("micro_batch_size"),
        seq_length=actor.integer("seq_length"),
        bf16=actor.switch("bf16", True),
        sequence_parallel=actor.switch("sequence_parallel", False),
        distributed_optimizer=actor.switch("use_distributed_optimizer", False),
        recompute=actor.text("recompute_granularity", None),
        recompute_method=actor.text("recompute_method", None),
        recompute_layers=actor.optional("recompute_num_layers"),
        attention_mask=actor.text("attention_mask_type", "causal"),
        reset_attention_mask=actor.switch("reset_attention_mask", False),
        no_pad_to_seq_lengths=actor.switch("no_pad_to_seq_lengths", False),
        prompts=actor.integer("global_batch_size"),
        group=rl.integer("n_samples_per_prompt", 1),
        mini_batch=rl.integer("mini_batch_size", 1),
        epochs=rl.integer("epochs", 1),
        remove_padding=rl.switch("use_remove_padding", False),
        dynamic_batch=rl.switch("use_dynamic_bsz", False),
        update_tokens=rl.integer("update_max_packing_token_size", packing),
        logprob_tokens=rl.integer("actor_max_packing_token_size", packing),
        rollout_dispatch=rl.optional("actor_rollout_dispatch_size"),
        logprob_dispatch=rl.optional("actor_logprob_dispatch_size"),
        update_dispatch=rl.optional("actor_update_dispatch_size"),
        advantage_dispatch=rl.optional("adv_dispatch_size"),
        reward_dispatch=rl.optional("reward_dispatch_size"),
        kl_coefficient=rl.number("init_kl_coef", 0.01),
        verifiers=rl.length("verifier_function", 1),
        verifier_weights=rl.length("verifier_weight", 1),
        guarantee_order=rl.switch("guarantee_order", False),
        partial_rollout_splits=rl.integer("partial_rollout_max_split", 1),
        zmq=rl.switch("zmq_communication", True),
        rollout_tp=generate.integer("infer_tensor_parallel_size", 8),
        rollout_pp=generate.integer("infer_pipeline_parallel_size", 1),
        max_prompt=rl.integer("max_prompt_length", 512),
        max_new=sampling.integer("max_tokens", 128),
        max_model_len=generate.integer("max_model_len", 2048),
        max_batched_tokens=generate.integer("max_num_batched_tokens", 2048),
        max_sequences=generate.integer("max_num_seqs", 1),
        memory_utilization=generate.number("gpu_memory_utilization", 0.5),
        rollout_dtype=str(generate.text("dtype", "bfloat16")),
        temperature=sampling.number("temperature", 1.0),
        sampling_seed=sampling.optional("seed"),
        top_k=sampling.integer("top_k", 50),
        top_p=sampling.number("top_p", 1.0),
        min_p=sampling.number("min_p", 0.0),
        offload_param=generate.switch("offload_train_param", False),
        offload_grad=generate.switch("offload_train_grad", False),
        offload_optimizer=generate.switch("offload_train_optimizer", False),
    )
