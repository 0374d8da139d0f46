"""The resolved configuration of a cluster run: one flat record of the typed sections and of MindSpeed-RL's.

Defaults are those of MindSpeed-RL's config classes, because a key that a YAML file leaves out has that value there.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from coca_mindspeed.config.schema import RunConfig
from coca_mindspeed.errors import Problem, raise_problems
from coca_mindspeed.mindspeed.upstream_keys import underscored

_SECTIONS = {
    "hardware": "hardware",
    "actor": "mindspeed_rl.actor_config",
    "rl": "mindspeed_rl.rl_config",
    "resource": "mindspeed_rl.rl_config.actor_resource",
    "generate": "mindspeed_rl.generate_config",
    "sampling": "mindspeed_rl.generate_config.sampling_config",
    "coca": "mindspeed_rl.coca",
    "method": "mindspeed_rl.coca.method",
}
_REQUIRED = object()
_PACKING = object()  # rl_config.max_packing_token_size
# MindSpeed-RL counts the microbatches that hold their limit and then evens them out by another rule (Karmarkar-Karp),
# which keeps to no limit: on response-like lengths it exceeded the limit by up to 2.5%.
_PACKING_EXCESS = 1.025


def _key(name: str, default: Any = _REQUIRED, *, key: str | None = None) -> Any:
    """A field read from ``section.name``; messages name ``key`` instead if given."""
    return field(metadata={"name": name, "default": default, "key": key})


@dataclass(frozen=True, slots=True)
class ResolvedConfig:
    """Numbers and switches of one run; sizes in tokens, ``None`` where MindSpeed-RL fills in the value itself."""

    method: str | None = _key("method.name", "coca")
    lr: float = _key("actor.lr")
    save_interval: int = _key("actor.save_interval")
    eval_interval: int = _key("coca.eval_interval", 0)
    keep_checkpoints: int | None = _key("coca.keep_checkpoints", None)
    train_data: str | None = _key("actor.data_path", None)
    eval_data: str | None = _key("coca.eval_data", None)
    tokenizer: str | None = _key("actor.tokenizer_name_or_path", None)
    load: str | None = _key("actor.load", None)
    nodes: int = _key("hardware.nodes")
    npus: int = _key("resource.num_npus")
    memory_gib: float = _key("hardware.memory_gib")
    reserved_gib: float = _key("hardware.reserved_gib")
    # the model
    layers: int = _key("actor.num_layers")
    hidden: int = _key("actor.hidden_size")
    heads: int = _key("actor.num_attention_heads")
    query_groups: int = _key("actor.num_query_groups", 1)
    grouped_queries: bool = _key("actor.group_query_attention", False)
    ffn: int = _key("actor.ffn_hidden_size")
    vocab: int = _key("actor.padded_vocab_size")
    untied_embeddings: bool = _key("actor.untie_embeddings_and_output_weights", False)
    qkv_bias: bool = _key("actor.add_qkv_bias", False)
    qk_layernorm: bool = _key("actor.qk_layernorm", False)
    context: int = _key("actor.max_position_embeddings")
    # training
    tp: int = _key("actor.tensor_model_parallel_size", 1)
    pp: int = _key("actor.pipeline_model_parallel_size", 1)
    cp: int = _key("actor.context_parallel_size", 1)
    micro_batch: int = _key("actor.micro_batch_size")
    sequence_parallel: bool = _key("actor.sequence_parallel", False)
    distributed_optimizer: bool = _key("actor.use_distributed_optimizer", False)
    recompute: str | None = _key("actor.recompute_granularity", None)
    # the batch
    prompts: int = _key("actor.global_batch_size", key="rollout.prompts")
    group: int = _key("rl.n_samples_per_prompt", 1, key="rollout.group_size")
    mini_batch: int = _key("rl.mini_batch_size", 1, key="trainer.minibatches")
    epochs: int = _key("rl.epochs", 1)
    remove_padding: bool = _key("rl.use_remove_padding", False)
    dynamic_batch: bool = _key("rl.use_dynamic_bsz", False)
    update_tokens: int = _key("rl.update_max_packing_token_size", _PACKING)
    logprob_tokens: int = _key("rl.actor_max_packing_token_size", _PACKING)
    rollout_dispatch: int | None = _key("rl.actor_rollout_dispatch_size", None)
    update_dispatch: int | None = _key("rl.actor_update_dispatch_size", None)
    kl_coefficient: float = _key("rl.init_kl_coef", 0.01)
    guarantee_order: bool = _key("rl.guarantee_order", False)
    # rollout
    rollout_tp: int = _key("generate.infer_tensor_parallel_size", 8)
    max_prompt: int = _key("rl.max_prompt_length", 512, key="rollout.max_prompt_tokens")
    max_new: int = _key("sampling.max_tokens", 128, key="rollout.max_new_tokens")
    max_model_len: int = _key("generate.max_model_len", 2048)
    max_batched_tokens: int = _key("generate.max_num_batched_tokens", 2048)
    ascend_scheduler: bool = _key("generate.ascend_scheduler_config_enabled", True)
    max_sequences: int = _key("generate.max_num_seqs", 1)
    memory_utilization: float = _key("generate.gpu_memory_utilization", 0.5)
    enforce_eager: bool = _key("generate.enforce_eager", True)
    temperature: float = _key("sampling.temperature", 1.0, key="rollout.temperature")
    sampling_seed: int | None = _key("sampling.seed", None)
    top_k: int = _key("sampling.top_k", 50)
    top_p: float = _key("sampling.top_p", 1.0)
    min_p: float = _key("sampling.min_p", 0.0)
    offload_param: bool = _key("generate.offload_train_param", False)
    offload_grad: bool = _key("generate.offload_train_grad", False)
    offload_optimizer: bool = _key("generate.offload_train_optimizer", False)

    @property
    def files(self) -> dict[str, str | None]:
        """Paths that the run reads, by the keys of ours that set them; ``weights`` are Megatron's."""
        return {
            **{"data.train": self.train_data, "data.evaluate": self.eval_data, "model.path": self.tokenizer},
            "weights": self.load,
        }

    @property
    def kv_groups(self) -> int:
        return self.query_groups if self.grouped_queries else self.heads

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
        return self.npus // self.rollout_tp

    @property
    def fills_npus(self) -> bool:
        """Whether whole copies of the model fill the NPUs, in training and in rollout."""
        copies = (self.model_parallel, self.rollout_tp)
        return self.npus > 0 and all(npus > 0 and self.npus % npus == 0 for npus in copies)

    @property
    def responses(self) -> int:
        """Responses per iteration."""
        return self.prompts * self.group

    @property
    def rank_responses(self) -> int:
        """Responses per data-parallel rank and iteration."""
        return self.responses // self.dp

    @property
    def rank_minibatch(self) -> int:
        """Responses of a data-parallel rank in one update."""
        return self.mini_batch * self.group // self.dp

    @property
    def engine_responses(self) -> int:
        """Responses that a rollout engine is asked for at once."""
        return self.rollout_dispatch or self.responses // self.rollout_dp

    @property
    def longest(self) -> int:
        """Longest prompt and response together."""
        return self.max_prompt + self.max_new

    @property
    def microbatch_tokens(self) -> int:
        """Most tokens that one rank holds activations for."""
        if self.dynamic_batch:
            tokens = math.ceil(_PACKING_EXCESS * max(self.update_tokens, self.longest))
        else:
            tokens = self.micro_batch * self.longest
        return -(-tokens // self.cp)


def _full_key(name: str) -> str:
    section, _, rest = name.partition(".")
    return f"{_SECTIONS[section]}.{rest}"


#: The configuration key of each field, for messages.
KEYS: dict[str, str] = {f.name: f.metadata["key"] or _full_key(f.metadata["name"]) for f in fields(ResolvedConfig)}

_TYPES: dict[Any, tuple[str, Callable[[Any], bool]]] = {
    int: ("must be a whole number", lambda value: type(value) is int),
    int | None: ("must be a whole number or null", lambda value: value is None or type(value) is int),
    float: ("must be a finite number", lambda value: type(value) in (int, float) and math.isfinite(value)),
    bool: ("must be true or false", lambda value: type(value) is bool),
    str | None: ("must be text", lambda value: value is None or isinstance(value, str)),
}


def resolve_config(run: RunConfig) -> ResolvedConfig:
    """Read the resolved configuration of a run for Ascend.

    Raises ConfigError if it is not for a cluster, or keys of MindSpeed-RL have values of the wrong type.
    """
    theirs, platform = run.mindspeed_rl, run.hardware.platform
    if platform == "local" or not theirs.get("actor_config"):
        fix = "choose hardware=ascend_910b or hardware=ascend_910c, and a model for it"
        raise_problems(
            [Problem("no-cluster", "hardware.platform", platform, "must be npu or host for a cluster run", fix)]
        )
    mappings = ("model", "megatron_training", "actor_config", "rl_config", "generate_config", "coca")
    wrong = [key for key in mappings if not isinstance(theirs.get(key, {}), Mapping)]
    raise_problems([Problem("wrong-type", f"mindspeed_rl.{key}", theirs[key], "must be a mapping") for key in wrong])
    theirs = underscored(theirs)
    training, own, coca = theirs.get("megatron_training", {}), theirs["actor_config"], theirs.get("coca", {})
    named = str(own.get("model", training.get("model"))).replace("-", "_")
    shapes = theirs.get("model", {}).get(named) or {}
    if not isinstance(shapes, Mapping):
        raise_problems([Problem("wrong-type", "mindspeed_rl.model", run.mindspeed_rl["model"], "must hold mappings")])
    actor = {**shapes, **training, **own}  # BaseConfig.update: later wins
    rl, generate = theirs.get("rl_config", {}), theirs.get("generate_config", {})
    sections = {
        **{"hardware": run.hardware.model_dump(), "actor": actor, "rl": rl, "generate": generate, "coca": coca},
        **{"method": coca.get("method") or {}, "resource": rl.get("actor_resource") or {}},
        "sampling": generate.get("sampling_config") or {},
    }
    if (experts := actor.get("num_experts")) is not None:
        reason = "must be absent: neither the layout nor the memory of a mixture of experts is planned"
        fix = "untried: start the driver with this YAML, without a plan (docs/port.md, How a run starts)"
        raise_problems([Problem("mixture-of-experts", "mindspeed_rl.model.actor.num_experts", experts, reason, fix)])
    packing, values, problems = rl.get("max_packing_token_size", 4096), dict[str, Any](), list[Problem]()
    for each in fields(ResolvedConfig):
        section, _, name = each.metadata["name"].partition(".")
        default = {_PACKING: packing, _REQUIRED: None}.get(each.metadata["default"], each.metadata["default"])
        value = sections[section].get(name, default)
        expected, holds = _TYPES[each.type]
        if not holds(value):
            problems.append(Problem("wrong-type", _full_key(each.metadata["name"]), value, expected))
        values[each.name] = float(value) if each.type is float and holds(value) else value
    raise_problems(problems)
    return ResolvedConfig(**values)
