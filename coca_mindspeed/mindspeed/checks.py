"""Checks of a cluster run before it starts: the layout of the plan, and conditions that would fail late or silently.

Docstrings and comments name the upstream function.  Other conditions are left to MindSpeed-RL's ``validate_rl_args``,
which refuses a run when the driver starts.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

from coca_mindspeed.config.checks import CHECKS, same_data
from coca_mindspeed.config.schema import RunConfig, Section
from coca_mindspeed.config.values import unread_keys
from coca_mindspeed.data.registry import conversion_command
from coca_mindspeed.errors import (
    Check,
    Condition,
    ConfigError,
    Problem,
    as_check,
    find_problems,
    problems_of,
    raise_problems,
    show_value,
)
from coca_mindspeed.mindspeed.keys import RENAMES, leaves, set_twice, translate, written_as
from coca_mindspeed.mindspeed.model_config import compare_model
from coca_mindspeed.mindspeed.resolved_config import KEYS, ResolvedConfig
from coca_mindspeed.mindspeed.stages.dataset import RECORD
from coca_mindspeed.mindspeed.start.process import CocaSettings
from coca_mindspeed.mindspeed.upstream_keys import (
    GRPO_VALUES,
    MINDSPEED_VERIFIERS,
    OWN_VERIFIER,
    ignored_keys,
    shipped_keys,
)
from coca_mindspeed.scoring.settings import checked_section
from coca_mindspeed.utils.text_formats import value_of


def _sizes(r: ResolvedConfig) -> Iterator[Condition]:
    for name in ("npus", "tp", "pp", "cp", "rollout_tp", "micro_batch"):  # the schema checks those of our keys
        yield "size", name, getattr(r, name) >= 1, "must be at least 1"


def _parallelism(r: ResolvedConfig) -> Iterator[Condition]:
    """``TransformerConfig.__post_init__``, Megatron's ``divide`` and ``validate_args``, ``_validate_resource``."""
    yield "heads-groups", "query_groups", r.heads % r.kv_groups == 0, f"must divide the {r.heads} attention heads"
    yield "hidden-heads", "heads", r.hidden % r.heads == 0, f"must divide the hidden size {r.hidden}"
    yield "tp-heads", "tp", r.heads % r.tp == 0, f"must divide the {r.heads} attention heads"
    yield "tp-groups", "tp", r.kv_groups % r.tp == 0, f"must divide the {r.kv_groups} key/value groups"
    yield "tp-mlp", "tp", r.ffn % r.tp == 0, f"must divide the MLP's inner size {r.ffn}"
    yield "tp-vocabulary", "tp", r.vocab % r.tp == 0, f"must divide the {r.vocab} rows of the embedding"
    yield "pp-layers", "pp", r.layers % r.pp == 0, f"must divide the {r.layers} layers"
    product = f"TP x PP x CP = {r.tp} x {r.pp} x {r.cp} = {r.model_parallel}"
    yield "layout-npus", "tp", r.npus % r.model_parallel == 0, f"{product} must divide the {r.npus} NPUs"
    yield "npus-nodes", "npus", r.npus % r.nodes == 0, f"must be a multiple of the {r.nodes} nodes"


def _rollout(r: ResolvedConfig) -> Iterator[Condition]:
    """``MegatronStyleVllmWeightContainer._validate_parallel_config``, ``qkv_split_weight``."""
    yield "rollout-npus", "rollout_tp", r.npus % r.rollout_tp == 0, f"must divide the {r.npus} NPUs"
    # The weight loader floors heads and groups by TP, so that a group is never shared between ranks.
    yield "rollout-heads", "rollout_tp", r.heads % r.rollout_tp == 0, f"must divide the {r.heads} attention heads"
    yield "rollout-groups", "rollout_tp", r.kv_groups % r.rollout_tp == 0, f"must divide the {r.kv_groups} groups"
    divides = r.tp <= r.rollout_tp or r.tp % r.rollout_tp == 0
    yield "rollout-training-tp", "rollout_tp", divides, f"must divide the training's TP {r.tp} if it is smaller"
    stage = r.npus // r.pp
    divides = r.tp >= r.rollout_tp or stage % r.rollout_tp == 0
    yield "rollout-stage", "rollout_tp", divides, f"above the training's TP {r.tp} must divide a stage's {stage} NPUs"
    # vLLM gives sample i of a prompt the seed + i: every prompt would be sampled with the same random numbers.
    yield "sampling-seed", "sampling_seed", r.sampling_seed is None, "must be null: all prompts would share its noise"
    cut = "the confidence states the success rate of the policy's own distribution"
    yield "sampling-cut", "top_k", r.top_k <= 0, f"must be -1: {cut}"
    yield "sampling-cut", "top_p", r.top_p == 1.0, f"must be 1.0: {cut}"
    yield "sampling-cut", "min_p", r.min_p == 0.0, f"must be 0.0: {cut}"
    # BaseTrainingEngine.forward_step divides the output of every pipeline stage by it, not only the logits.
    yield "temperature", "temperature", r.temperature == 1.0 or r.pp == 1, "must be 1.0 with pipeline parallelism"


def _batches(r: ResolvedConfig) -> Iterator[Condition]:
    """``_validate_data_parallel``; minibatches and updates of whole groups."""
    grading = f"must be a multiple of the {r.nodes} nodes, each of which grades its share"
    yield "prompts-nodes", "prompts", r.prompts % r.nodes == 0, grading
    if not r.fills_npus:
        return
    ranks = f"must be a multiple of the {r.dp} data-parallel ranks"
    yield "prompts-dp", "prompts", r.prompts % r.dp == 0, ranks
    engines = f"must be a multiple of the {r.rollout_dp} rollout engines"
    yield "prompts-engines", "prompts", r.prompts % r.rollout_dp == 0, engines
    if r.prompts % r.dp:
        return
    # BaseTrainingEngine floors mini_batch_size / dp: an update would be smaller than configured.
    yield "mini-batch-dp", "mini_batch", r.mini_batch % r.dp == 0, ranks
    share = f"must divide the {r.rank_responses} responses of a data-parallel rank"
    yield "micro-batch", "micro_batch", r.rank_responses % r.micro_batch == 0, share
    if (dispatched := r.update_dispatch) is not None:
        # BaseTrainingEngine.update would make a smaller minibatch of the rest of every dispatch.
        whole = not r.rank_minibatch or (dispatched > 0 and dispatched % r.rank_minibatch == 0)
        reason = f"must be a multiple of a rank's minibatch of {r.rank_minibatch} responses"
        yield "dispatch-minibatch", "update_dispatch", whole, reason
        # ActorHybridWorkerBase.update takes one dispatch of each rank's share and no more.
        all_at_once = not r.guarantee_order or dispatched == r.rank_responses
        reason = f"must be a rank's {r.rank_responses} responses with guarantee_order"
        yield "dispatch-order", "update_dispatch", all_at_once, reason


def _lengths(r: ResolvedConfig) -> Iterator[Condition]:
    """The model's context, vLLM-Ascend's scheduler, ``rearrange_micro_batches``."""
    context = f"with a prompt of {r.max_prompt} must fit the model's context of {r.context}"
    yield "context", "max_new", r.longest <= r.context, context
    fits = r.max_model_len <= r.context or r.longest > r.context
    yield "context", "max_model_len", fits, f"must be at most the model's context of {r.context}"
    enough = r.max_batched_tokens >= r.max_model_len or not r.ascend_scheduler  # vLLM's own splits prompts
    reason = f"must be at least max_model_len {r.max_model_len}"
    yield "batched-tokens", "max_batched_tokens", enough, reason, f"set it to {r.max_model_len}"
    if r.dynamic_batch:
        yield "padding-dynamic", "remove_padding", r.remove_padding, "must be true: use_dynamic_bsz packs responses"
        for name in ("update_tokens", "logprob_tokens"):
            holds = getattr(r, name) >= r.longest
            yield "packing", name, holds, f"must hold the longest prompt and response together, {r.longest}"


def layout_problems(resolved: ResolvedConfig) -> list[Problem]:
    """Problems of the resolved configuration under its fields' names; if sizes are below 1, only those."""
    layout = (_parallelism, _rollout, _batches, _lengths)
    return find_problems(resolved, [as_check(_sizes)], [as_check(conditions) for conditions in layout])


def _run_conditions(run: RunConfig, iterations: int | None) -> Iterator[Condition]:
    """Values of our sections that MindSpeed-RL cannot have; it would ignore most of them silently."""
    model, optimizer, updates = run.model, run.optimizer, run.trainer
    yield "built-in-model", "model.path", model.path is not None, "must name a directory on a cluster"
    converted = run.hardware.platform == "host" or model.megatron_path is not None
    random = "must name Megatron weights: Megatron would start from random ones"
    yield "no-weights", "model.megatron_path", converted, random, "convert them: launch/convert_weights.sh hf2mcore"
    yield "records-only", "data.name", run.data.name == "records", "must be records on a cluster"
    once = not optimizer.warmup_steps or updates.minibatches * updates.ppo_epochs == 1
    yield "warmup-updates", "optimizer.warmup_steps", once, "must be 0 with several updates per step"
    shorter = iterations is None or optimizer.warmup_steps < iterations
    reason = f"must be below the {iterations} iterations of a stage, before which the warm-up must end"
    yield "warmup-length", "optimizer.warmup_steps", shorter, reason
    other, reason = optimizer.schedule != "wsd", "must not be wsd: only the local engine has it"
    yield "schedule-wsd", "optimizer.schedule", other, reason
    whole = optimizer.schedule == "constant" or updates.ppo_epochs == 1
    reason = f"must be constant: Megatron would finish the schedule after 1/{updates.ppo_epochs} of the run"
    yield "schedule-epochs", "optimizer.schedule", whole, reason
    saves = run.checkpoint.interval >= 1
    yield "checkpoint-interval", "checkpoint.interval", saves, "must be at least 1: MindSpeed-RL divides by it"
    fix = "on the CPU shim, set mindspeed_rl.coca.host.dtype instead"
    yield "compute-dtype", "model.compute_dtype", model.compute_dtype == "bfloat16", "must be bfloat16", fix
    for key, instead in unread_keys(RunConfig, "mindspeed_rl").items():
        section, _, name = key.partition(".")
        if name and not isinstance(found := attrgetter(key)(run), Section):
            default = attrgetter(name)(RunConfig.model_fields[section].default)
            reason = f"must be {show_value(default)} on a cluster"
            yield "local-only", key, found == default, reason, instead


def run_problems(
    run: RunConfig, resolved: ResolvedConfig, iterations: int | None, file_values: Callable[[], dict[str, Any]]
) -> list[Problem]:
    """Find all problems of a cluster run.

    ``iterations`` is the length of a stage (None: unknown), ``file_values`` makes the configuration that the driver
    reads.
    """
    checks: tuple[Check[RunConfig], ...] = (
        *CHECKS,
        same_data,
        as_check(lambda run: _run_conditions(run, iterations)),
        lambda run: compare_model(run.model.path, translate(run)).problems,
        set_twice,
        lambda run: _npus(run, resolved),
        lambda run: _layout(run, resolved),
        lambda run: _driver(run, file_values()),
        _upstream_keys,
    )
    return find_problems(run, checks)


def _layout(run: RunConfig, resolved: ResolvedConfig) -> Iterator[Problem]:
    """Problems of the layout, under configuration keys."""
    for problem in layout_problems(resolved):
        value = run.trainer.minibatches if problem.key == "mini_batch" else problem.value
        yield problem._replace(key=KEYS[problem.key], value=value)


def _npus(run: RunConfig, resolved: ResolvedConfig) -> Iterator[Problem]:
    hardware, others = run.hardware, other_npus(run.mindspeed_rl)
    expected = hardware.nodes * hardware.npus_per_node - sum(others.values())
    if resolved.npus != expected:
        reason = "".join(f", {npus} of them for rl_config.{key}" for key, npus in others.items())
        reason = f"hardware has {hardware.nodes} x {hardware.npus_per_node} NPUs{reason}"
        fix = f"set it to {expected}" if expected > 0 else ""
        yield Problem("hardware-npus", KEYS["npus"], resolved.npus, reason, fix)


def other_npus(values: dict[str, Any]) -> dict[str, int]:
    """Key -> NPUs that MindSpeed-RL reserves besides the actor's if its workers are separate."""
    rl = values.get("rl_config", {})
    if rl.get("use_integrated_worker", True):
        return {}
    groups = ["reference_resource"] * needs_reference(values) + ["reward_resource"]
    npus = {key: (rl.get(key) or {}).get("num_npus") for key in groups}
    return {key: int(count) for key, count in npus.items() if count}


def _driver(run: RunConfig, values: dict[str, Any]) -> Iterator[Problem]:
    """Problems that the driver would find in its configuration, by the keys that set them."""
    try:
        split_config(OmegaConf.create(values))
    except ConfigError as error:
        for problem in problems_of(error, "mindspeed-rl", "coca"):
            if problem.code != "hook-warmup" or not run.optimizer.warmup_steps:  # else found in our own section
                yield problem._replace(key=RENAMES.get(problem.key, f"mindspeed_rl.{problem.key}"))


def _upstream_keys(run: RunConfig) -> Iterator[Problem]:
    """Keys that MindSpeed-RL would refuse, and keys without effect, which it would not."""
    values = run.mindspeed_rl
    ignored = ignored_keys(values, reference=needs_reference(values))
    for problem in (*shipped_keys().problems(values), *ignored):
        found = problem._replace(key=f"mindspeed_rl.{problem.key}")
        elsewhere = written_as(problem.key, problem.value, values) if problem.code == "unknown-key" else []
        yield found._replace(fix=f"write {' and '.join(elsewhere)}") if elsewhere else found


_DEFAULTS = {  # MindSpeed-RL's
    "clip_ratio": 0.2,
    "init_kl_coef": 0.01,
    "partial_rollout_max_split": 1,
    "n_samples_per_prompt": 1,
    "reward_dispatch_size": 0,
    "adv_dispatch_size": 0,
}


@dataclass(frozen=True)
class HookConfig:
    """MindSpeed-RL's configuration without the section ``coca``, and that section."""

    config: Mapping[str, Any]
    settings: CocaSettings

    def section(self, name: str) -> Mapping[str, Any]:
        return self.config.get(name) or {}

    def get(self, key: str) -> Any:
        """Value of a dotted key, or MindSpeed-RL's default."""
        section, _, name = key.partition(".")
        if section == "coca":
            return attrgetter(name)(self.settings)
        value = value_of(self.config, key)
        return _DEFAULTS.get(name) if value is None and section == "rl_config" else value

    def actor_key(self, name: str) -> str:
        """Full key of an actor's setting; MindSpeed-RL lets ``actor_config`` win over ``megatron_training``."""
        return f"{'actor_config' if name in self.section('actor_config') else 'megatron_training'}.{name}"


def _unsupported_values(c: HookConfig) -> Iterator[Condition]:
    rl, clip = c.section("rl_config"), c.settings.method.clip
    key = c.actor_key("stage")
    yield "hook-stage", key, c.get(key) == "ray_grpo", "must be ray_grpo"
    strategy = str(rl.get("data_strategy") or "td").strip().lower()
    docked = strategy in ("td", "dock", "transfer_dock")
    yield "hook-data-strategy", "rl_config.data_strategy", docked, "must be td: the hooks use the transfer dock"
    key = "rl_config.clip_ratio"
    yield "hook-clip", key, c.get(key) == clip, f"must equal coca.method.clip {clip}"
    read = rl.get("rule_reward", True)
    yield "hook-rule-reward", "rl_config.rule_reward", read, "must be true: its worker also reads the confidences"
    # BaseTrainingEngine._forward_backward_batch also shuffles its forward passes, whose results come back in the order
    # of the batch; and every pipeline stage shuffles by a seed of its own.
    for name, reason in (
        ("filter_groups_enable", "must be false: its rollout would not use the newest weights"),
        ("shuffle_mini_batch", "must be false: it would also shuffle the old log-probabilities"),
        ("multi_turn_enable", "must be false: a response is one turn"),
        ("entropy_coeff", "must be 0: the objective has no entropy term"),
    ):
        yield f"hook-{name.replace('_', '-')}", f"rl_config.{name}", not rl.get(name), reason
    for key, value in leaves(c.config):
        if key.rpartition(".")[2].replace("-", "_").startswith("lora_"):
            reason, fix = "must be absent: LoRA of MindSpeed-RL is neither hooked nor planned", "train all weights"
            yield "lora", key, value is None, reason, f"{fix}, or use the local engine (model.lora.rank)"
    for name, values in GRPO_VALUES.items():
        accepted, shown = rl.get(name) in (None, *values), " or ".join(map(show_value, values))
        reason = f"must be absent or {shown}: another value asks for another algorithm"
        yield "hook-algorithm", f"rl_config.{name}", accepted, reason
    saves = "must name a directory: MindSpeed-RL always saves after the last iteration"
    yield "hook-save", "actor_config.save", c.get("actor_config.save"), saves
    # OptimizerParamScheduler asserts these two in the workers, without a message.
    key, part = c.actor_key("lr_warmup_fraction"), c.get(c.actor_key("lr_warmup_fraction")) or 0
    ends = isinstance(part, int | float) and 0 <= part < 1
    yield "hook-warmup", key, ends, "must be a number from 0 and below 1: the warm-up must end before the run does"
    key, least, lr = c.actor_key("min_lr"), c.get(c.actor_key("min_lr")) or 0, c.get(c.actor_key("lr"))
    below = isinstance(least, int | float) and 0 <= least <= (lr if isinstance(lr, int | float) else math.inf)
    yield "hook-min-lr", key, below, f"must be a number from 0 to the learning rate {lr}"
    key = "rl_config.partial_rollout_max_split"
    yield "whole-groups", key, c.get(key) <= 1, "must be 1: whole groups"
    # The first rollout would end with "vllm dp groups is None".
    single = (rl.get("actor_resource") or {}).get("num_npus") == 1 and c.settings.rollout_engine == "vllm"
    reason = "must be false on a single NPU: MindSpeed-RL makes no groups of rollout ranks"
    yield "hook-guarantee-order", "rl_config.guarantee_order", not (rl.get("guarantee_order") and single), reason
    if c.settings.method.reads_log_probs:
        yield from _entropy_bonus(c)
    else:
        measured = not (rl.get("async_engine") and c.settings.rollout_log_probs)
        yield "hook-async-engine", "coca.rollout_log_probs", measured, "must be false with rl_config.async_engine"
    key, weighs = "coca.rollout_is_threshold", c.settings.rollout_is_threshold is not None
    reason = "must be null without coca.rollout_log_probs; vLLM also needs the temperature 1"
    yield "rollout-weights", key, c.settings.rollout_log_probs or not weighs, reason
    group = int(c.get("rl_config.n_samples_per_prompt"))
    yield "group-size", "rl_config.n_samples_per_prompt", group >= 2, "must be at least 2"
    for key in ("rl_config.reward_dispatch_size", "rl_config.adv_dispatch_size"):
        whole = group < 2 or int(c.get(key)) % group == 0
        yield "dispatch-groups", key, whole, f"must hold whole groups of {group}"
    if not rl.get("use_integrated_worker", True):
        for key in ("ref_config", "reward_config", "rl_config.reference_resource"):
            reason = "must be present with rl_config.use_integrated_worker: false, with or without such a model"
            yield "separate-worker", key, c.get(key), reason
    path, key = c.actor_key("data_path"), c.actor_key("dataset_additional_keys")
    if c.get(path) is not None:
        fix = "data.train=FILE; coca-mindspeed data prepare writes records (packed data sets are not read)"
        if (file := Path(str(c.get(path)))).is_file():
            fix = f"convert it: {conversion_command(file)}"
        yield "record-file", path, str(c.get(path)).endswith(".jsonl"), "must be a file of records (.jsonl)", fix
        yield "data-columns", key, RECORD in list(c.get(key) or []), f"must be [{RECORD}]"
    # MindSpeed-RL's ``rule_verifier`` scores 0 for a name that it does not know.
    names = list(c.get("rl_config.verifier_function") or [])
    known = names == [OWN_VERIFIER] or (names and set(names) <= set(MINDSPEED_VERIFIERS))
    expected = f"must be [{OWN_VERIFIER}], or verifiers of MindSpeed-RL: {', '.join(MINDSPEED_VERIFIERS)}"
    yield "verifiers", "rl_config.verifier_function", known, expected


def _entropy_bonus(c: HookConfig) -> Iterator[Condition]:
    """Advantages are computed before the old log-probs, so the bonus is made of the rollout's."""
    why = "with coca.method.entropy_bonus, which reads the rollout's log-probs"
    yield "entropy-bonus", "rl_config.async_engine", not c.get("rl_config.async_engine"), f"must be false {why}"
    key, whole = "generate_config.sampling_config.temperature", _has_log_probs_of_samples(c.config, c.settings)
    yield "entropy-bonus", key, whole, f"must be 1.0 {why}: vLLM returns them before the temperature is applied"
    measured = c.settings.rollout_log_probs or not whole
    yield "entropy-bonus", "coca.rollout_log_probs", measured, f"must be true {why}"
    key = "generate_config.sampling_config.logprobs"
    returned = c.settings.rollout_engine != "vllm" or value_of(c.config, key, 1) is not None
    yield "entropy-bonus", key, returned, f"must be 1 {why}"


def _has_log_probs_of_samples(config: Mapping[str, Any], settings: CocaSettings) -> bool:
    """Whether the rollout's log-probs are of the distribution that it samples from.

    vLLM returns log-probs before the temperature is applied.
    """
    temperature = value_of(config, "generate_config.sampling_config.temperature", 1.0)
    return settings.rollout_engine != "vllm" or float(temperature) == 1.0


def needs_reference(config: Mapping[str, Any]) -> bool:
    """Whether a KL term, and so a reference model, is configured; MindSpeed-RL's default is one."""
    value = (config.get("rl_config") or {}).get("init_kl_coef")
    return float(_DEFAULTS["init_kl_coef"] if value is None else value) > 0


def split_config(config: DictConfig) -> tuple[CocaSettings, DictConfig]:
    """The section ``coca``, checked, and MindSpeed-RL's configuration, whose values have the right types, without it.

    Raises ConfigError if the section is wrong, or a MindSpeed-RL key has a value that the hooks do not support.
    """
    theirs: Any = OmegaConf.to_container(config, resolve=True)
    settings = checked_section(CocaSettings, theirs.pop("coca", None) or {})
    if not _has_log_probs_of_samples(theirs, settings):  # so they cannot be compared with training's
        settings = settings.model_copy(update={"rollout_log_probs": False})
    with open_dict(config):
        config.pop("coca", None)
    raise_problems(find_problems(HookConfig(theirs, settings), [as_check(_unsupported_values, HookConfig.get)]))
    return settings, config
