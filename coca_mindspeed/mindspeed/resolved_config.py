"""The resolved configuration of a cluster run: one flat record of what the run file says.

A key that a YAML file leaves out has the default of MindSpeed-RL's config classes.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import Field, ValidationError

from coca_mindspeed.config.layout import Layout
from coca_mindspeed.config.schema import RunConfig, Section
from coca_mindspeed.errors import Problem, raise_problems, validation_problems
from coca_mindspeed.mindspeed.keys import THEIRS, actor_values, of_the_actor, underscored
from coca_mindspeed.mindspeed.requirements import MindSpeedView
from coca_mindspeed.utils.text_formats import value_of

# MindSpeed-RL counts the microbatches that hold their limit and then evens them out by another rule (Karmarkar-Karp),
# which keeps to no limit: on response-like lengths it exceeded the limit by up to 2.5%.
_PACKING_EXCESS = 1.025


class ResolvedConfig(Section):
    """Numbers and switches of one run; sizes in tokens, ``None`` where MindSpeed-RL fills in the value itself.

    An alias names the key: ours, or a free key of MindSpeed-RL.
    """

    lr: float = Field(alias="optimizer.lr")
    save_interval: int = Field(alias="checkpoint.interval")
    save_minutes: float | None = Field(None, alias="checkpoint.minutes")
    keep_checkpoints: int | None = Field(None, alias="checkpoint.keep")
    load: str | None = Field(alias="model.megatron_path")
    nodes: int = Field(alias="hardware.nodes")
    npus: int = Field(alias="mindspeed_rl.rl_config.actor_resource.num_npus")
    memory_gib: float = Field(alias="hardware.memory_gib")
    reserved_gib: float = Field(alias="hardware.reserved_gib")
    # the model
    layers: int = Field(alias="model.architecture.layers")
    hidden: int = Field(alias="model.architecture.hidden")
    heads: int = Field(alias="model.architecture.heads")
    query_groups: int = Field(alias="model.architecture.kv_groups")
    grouped_queries: bool = Field(alias="mindspeed_rl.model.actor.group_query_attention")
    ffn: int = Field(alias="model.architecture.ffn")
    vocab: int = Field(alias="model.architecture.vocab")
    untied_embeddings: bool = Field(alias="model.architecture.untied_embeddings")
    qkv_bias: bool = Field(alias="model.architecture.qkv_bias")
    qk_layernorm: bool = Field(alias="model.architecture.qk_layernorm")
    context: int = Field(alias="model.architecture.context")
    # training
    tp: int = Field(alias="mindspeed_rl.actor_config.tensor_model_parallel_size")
    pp: int = Field(alias="mindspeed_rl.actor_config.pipeline_model_parallel_size")
    cp: int = Field(alias="mindspeed_rl.actor_config.context_parallel_size")
    micro_batch: int = Field(alias="mindspeed_rl.actor_config.micro_batch_size")
    sequence_parallel: bool = Field(alias="mindspeed_rl.megatron_training.sequence_parallel")
    distributed_optimizer: bool = Field(alias="mindspeed_rl.megatron_training.use_distributed_optimizer")
    recompute: str | None = Field(alias="mindspeed_rl.megatron_training.recompute_granularity")
    recompute_method: str | None = Field(alias="mindspeed_rl.megatron_training.recompute_method")
    recompute_layers: int | None = Field(alias="mindspeed_rl.megatron_training.recompute_num_layers")
    # the batch
    prompts: int = Field(alias="rollout.prompts")
    group: int = Field(alias="rollout.group_size")
    mini_batch: int = Field(alias="trainer.minibatches")
    epochs: int = Field(alias="trainer.ppo_epochs")
    remove_padding: bool = Field(alias="mindspeed_rl.rl_config.use_remove_padding")
    dynamic_batch: bool = Field(alias="mindspeed_rl.rl_config.use_dynamic_bsz")
    update_tokens: int = Field(alias="mindspeed_rl.rl_config.update_max_packing_token_size")
    logprob_tokens: int = Field(alias="mindspeed_rl.rl_config.actor_max_packing_token_size")
    reference_tokens: int = Field(alias="mindspeed_rl.rl_config.ref_max_packing_token_size")
    rollout_dispatch: int | None = Field(alias="mindspeed_rl.rl_config.actor_rollout_dispatch_size")
    update_dispatch: int | None = Field(alias="mindspeed_rl.rl_config.actor_update_dispatch_size")
    kl_coefficient: float = Field(alias="mindspeed_rl.rl_config.init_kl_coef")
    guarantee_order: bool = Field(alias="mindspeed_rl.rl_config.guarantee_order")
    # rollout
    rollout_tp: int = Field(alias="mindspeed_rl.generate_config.infer_tensor_parallel_size")
    max_prompt: int = Field(alias="rollout.max_prompt_tokens")
    max_new: int = Field(alias="rollout.max_new_tokens")
    max_model_len: int = Field(alias="mindspeed_rl.generate_config.max_model_len")
    max_batched_tokens: int = Field(alias="mindspeed_rl.generate_config.max_num_batched_tokens")
    ascend_scheduler: bool = Field(alias="mindspeed_rl.generate_config.ascend_scheduler_config_enabled")
    max_sequences: int = Field(alias="mindspeed_rl.generate_config.max_num_seqs")
    memory_utilization: float = Field(alias="mindspeed_rl.generate_config.gpu_memory_utilization")
    enforce_eager: bool = Field(alias="mindspeed_rl.generate_config.enforce_eager")
    temperature: float = Field(alias="rollout.temperature")
    sampling_seed: int | None = Field(None, alias="mindspeed_rl.generate_config.sampling_config.seed")
    top_k: int = Field(50, alias="mindspeed_rl.generate_config.sampling_config.top_k")
    top_p: float = Field(1.0, alias="mindspeed_rl.generate_config.sampling_config.top_p")
    min_p: float = Field(0.0, alias="mindspeed_rl.generate_config.sampling_config.min_p")
    offload_param: bool = Field(alias="mindspeed_rl.generate_config.offload_train_param")
    offload_grad: bool = Field(alias="mindspeed_rl.generate_config.offload_train_grad")
    offload_optimizer: bool = Field(alias="mindspeed_rl.generate_config.offload_train_optimizer")

    @property
    def kv_groups(self) -> int:
        return self.query_groups if self.grouped_queries else self.heads

    @property
    def layout(self) -> Layout:
        return Layout(
            devices=self.npus,
            rank_devices=self.tp * self.pp * self.cp,
            sampling_devices=self.npus,
            engine_devices=self.rollout_tp,
            prompts=self.prompts,
            group=self.group,
            mini_batch=self.mini_batch,
            passes=self.epochs,
            max_prompt=self.max_prompt,
            max_new=self.max_new,
        )

    @property
    def fills_npus(self) -> bool:
        """Whether whole copies of the model fill the NPUs, in training and in rollout."""
        return self.layout.whole_ranks and self.layout.whole_engines

    @property
    def engine_responses(self) -> int:
        """Responses that a rollout engine is asked for at once."""
        return self.rollout_dispatch or self.layout.responses // self.layout.engines

    @property
    def microbatch_tokens(self) -> int:
        """Most tokens that one rank holds activations for."""
        return self._tokens(self.update_tokens)

    @property
    def forward_tokens(self) -> int:
        """Most tokens of a forward pass for log-probs of the actor or the reference; 0 if there is none.

        MindSpeed-RL takes the log-probs of a single update from the update.
        """
        actor = self._tokens(self.logprob_tokens) if self.layout.updates > 1 else 0
        return max(actor, self._tokens(self.reference_tokens) if self.kl_coefficient > 0 else 0)

    def _tokens(self, limit: int) -> int:
        if self.dynamic_batch:
            tokens = math.ceil(_PACKING_EXCESS * max(limit, self.layout.longest))
        else:
            tokens = self.micro_batch * self.layout.longest
        return -(-tokens // self.cp)


#: The configuration key of each field, for messages.
KEYS = {name: str(field.alias) for name, field in ResolvedConfig.model_fields.items()}
_ABSENT = object()


def refuse_mixtures(values: Mapping[str, Any], prefix: str = "") -> None:
    """Raise ConfigError for a mixture of experts in MindSpeed-RL's sections."""
    actor = actor_values(underscored(values))
    if (experts := actor.get("num_experts")) is not None:
        reason = "must be absent: neither the layout nor the memory of a mixture of experts is planned"
        key = f"{prefix}model.{actor.get('model', 'actor')}.num_experts"
        raise_problems([Problem("mixture-of-experts", key, experts, reason, "train a dense model")])


def resolve_config(run: RunConfig, translated: Mapping[str, Any], name_of: Callable[[str], str]) -> ResolvedConfig:
    """Read the resolved configuration of a run for Ascend: its hardware, and ``translated``, MindSpeed-RL's sections.

    ``name_of`` gives the names of our keys in the run's file.

    Raises ConfigError if it is not for a cluster, or keys of MindSpeed-RL have values of the wrong type.
    """
    if (platform := run.hardware.platform) == "local":
        fix = "choose hardware=ascend_910b or hardware=ascend_910c, and a model for it"
        raise_problems(
            [Problem("no-cluster", "hardware.platform", platform, "must be npu or host for a cluster run", fix)]
        )
    if run.model.architecture is None:
        fix = "choose a model for a cluster: model=qwen25_7b"
        raise_problems([Problem("no-architecture", "model.architecture", None, "must be the model's shapes", fix)])
    refuse_mixtures(translated, "mindspeed_rl.")
    view = MindSpeedView(translated)
    read = {KEYS[name]: getattr(run.hardware, name) for name in ("nodes", "memory_gib", "reserved_gib")}
    for ours in set(KEYS.values()).difference(read):
        key = of_the_actor(THEIRS.get(ours, ours).removeprefix("mindspeed_rl."))
        value = value_of(view.values, view.place(key), view.DEFAULTS.get(key, _ABSENT))
        if value is not _ABSENT:
            read[ours] = value
    try:
        return ResolvedConfig.model_validate(read)
    except ValidationError as error:
        problems = validation_problems(error)
        raise_problems([problem._replace(code="wrong-type", key=name_of(problem.key)) for problem in problems])
        raise
