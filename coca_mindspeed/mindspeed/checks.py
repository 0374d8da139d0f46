"""Checks of a cluster run before it starts: the layout of the plan, and conditions that would fail late or silently.

Docstrings and comments name the upstream function.  Other conditions are left to MindSpeed-RL's ``validate_rl_args``,
which refuses a run when the driver starts.
"""

from collections.abc import Callable, Iterator, Mapping
from operator import attrgetter
from typing import Any

from omegaconf import OmegaConf

from coca_mindspeed.config.checks import CHECKS, differing_shapes
from coca_mindspeed.config.schema import RunConfig, Section
from coca_mindspeed.config.values import facts_of
from coca_mindspeed.errors import (
    Check,
    Condition,
    ConfigError,
    Problem,
    as_check,
    find_problems,
    problems_of,
    show_value,
)
from coca_mindspeed.mindspeed.hook_checks import needs_reference
from coca_mindspeed.mindspeed.resolved_config import KEYS, ResolvedConfig
from coca_mindspeed.mindspeed.start.driver import split_config
from coca_mindspeed.mindspeed.upstream_keys import ignored_keys, set_twice, shipped_keys

_SIZES = ("npus", "tp", "pp", "cp", "rollout_tp", "micro_batch", "mini_batch", "prompts", "group")


def _sizes(r: ResolvedConfig) -> Iterator[Condition]:
    for name in _SIZES:
        yield "size", name, getattr(r, name) >= 1, "must be at least 1"


def _parallelism(r: ResolvedConfig) -> Iterator[Condition]:
    """``TransformerConfig.__post_init__``, Megatron's ``divide`` and ``validate_args``, ``_validate_resource``."""
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
    yield "mini-batch", "mini_batch", r.prompts % r.mini_batch == 0, f"must divide the {r.prompts} prompts"
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
    enough = r.max_batched_tokens >= r.max_model_len or not r.ascend_scheduler  # vLLM's own splits prompts
    yield "batched-tokens", "max_batched_tokens", enough, f"must be at least max_model_len {r.max_model_len}"
    if r.dynamic_batch:
        yield "padding-dynamic", "remove_padding", r.remove_padding, "must be true: use_dynamic_bsz packs responses"
        for name in ("update_tokens", "logprob_tokens"):
            holds = getattr(r, name) >= r.longest
            yield "packing", name, holds, f"must hold the longest prompt and response together, {r.longest}"


_LAYOUT = (_parallelism, _rollout, _batches, _lengths)


def layout_problems(resolved: ResolvedConfig) -> list[Problem]:
    """Problems of the resolved configuration under its fields' names; if sizes are below 1, only those."""
    return find_problems(resolved, [as_check(_sizes)], [as_check(conditions) for conditions in _LAYOUT])


def _run_conditions(run: RunConfig) -> Iterator[Condition]:
    """Values of our sections that MindSpeed-RL cannot have; it would ignore them silently."""
    model, optimizer, updates = run.model, run.optimizer, run.trainer
    yield "built-in-model", "model.path", model.path is not None, "must name a directory on a cluster"
    converted = run.hardware.platform == "host" or model.megatron_path is not None
    random = "must name Megatron weights: Megatron would start from random ones"
    yield "no-weights", "model.megatron_path", converted, random, "convert them: launch/convert_weights.sh hf2mcore"
    yield "records-only", "data.name", run.data.name == "records", "must be records on a cluster"
    once = not optimizer.warmup_steps or updates.minibatches * updates.ppo_epochs == 1
    yield "warmup-updates", "optimizer.warmup_steps", once, "must be 0 with several updates per step"
    other, reason = optimizer.schedule != "wsd", "must not be wsd: only the local engine has it"
    yield "schedule-wsd", "optimizer.schedule", other, reason
    whole = optimizer.schedule == "constant" or updates.ppo_epochs == 1
    reason = f"must be constant: Megatron would finish the schedule after 1/{updates.ppo_epochs} of the run"
    yield "schedule-epochs", "optimizer.schedule", whole, reason
    saves = run.checkpoint.interval >= 1
    yield "checkpoint-interval", "checkpoint.interval", saves, "must be at least 1: MindSpeed-RL divides by it"
    fix = "on the CPU shim, set mindspeed_rl.coca.host.dtype instead"
    yield "compute-dtype", "model.compute_dtype", model.compute_dtype == "bfloat16", "must be bfloat16", fix
    for key, facts in facts_of(RunConfig).items():
        section, _, name = key.partition(".")
        if facts.cluster and name and not isinstance(found := attrgetter(key)(run), Section):
            default = attrgetter(name)(RunConfig.model_fields[section].default)
            reason = f"must be {show_value(default)} on a cluster"
            yield "local-only", key, found == default, reason, facts.cluster


def run_problems(
    run: RunConfig,
    resolved: ResolvedConfig,
    written: Mapping[str, tuple[Any, str]],
    file_values: Callable[[], dict[str, Any]],
) -> list[Problem]:
    """Find all problems of a cluster run.

    ``file_values`` makes the configuration that the driver reads; ``written`` are the keys of it that get their value
    only then (``written_keys``).
    """
    checks: tuple[Check[RunConfig], ...] = (
        *CHECKS,
        as_check(_run_conditions),
        lambda run: differing_shapes("model.path", run.model.path, run.model.architecture, "model.architecture"),
        lambda run: set_twice(run, written),
        lambda run: _npus(run, resolved),
        lambda run: _layout(resolved),
        lambda run: _hooks(run, file_values()),
        _upstream_keys,
    )
    return find_problems(run, checks)


def _layout(resolved: ResolvedConfig) -> Iterator[Problem]:
    """Problems of the layout, under configuration keys."""
    for problem in layout_problems(resolved):
        as_set = problem.key == "mini_batch" and problem.value > 0
        value = resolved.prompts // problem.value if as_set else problem.value
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


def _hooks(run: RunConfig, values: dict[str, Any]) -> Iterator[Problem]:
    """Problems that the driver would find in its configuration."""
    try:
        split_config(OmegaConf.create(values))
    except ConfigError as error:
        for problem in problems_of(error, "mindspeed-rl", "coca"):
            if problem.code != "entropy-bonus" or not run.method.entropy_bonus:  # else found in our own section
                yield problem._replace(key=f"mindspeed_rl.{problem.key}")


def _upstream_keys(run: RunConfig) -> Iterator[Problem]:
    """Keys that MindSpeed-RL would refuse, and keys without effect, which it would not."""
    values = run.mindspeed_rl
    ignored = ignored_keys(values, reference=needs_reference(values))
    for problem in (*shipped_keys().problems(values), *ignored):
        yield problem._replace(key=f"mindspeed_rl.{problem.key}")
