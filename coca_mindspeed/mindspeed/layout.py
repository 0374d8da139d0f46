"""Requirements on the layout of a cluster run: sizes that divide, sampling, batches, lengths.

Docstrings and comments name the upstream function that fails late, or silently does something else.
"""

from collections.abc import Callable
from operator import attrgetter
from typing import Any

from coca_mindspeed.config.requirements import Requirement, required
from coca_mindspeed.errors import Problem, find_problems
from coca_mindspeed.mindspeed.resolved_config import ResolvedConfig

Row = Requirement[ResolvedConfig]
_When = Callable[[ResolvedConfig], object]


def _whole_ranks(r: ResolvedConfig) -> bool:
    return r.fills_npus and r.prompts % r.layout.ranks == 0


def _whole_dispatches(dispatched: int, r: ResolvedConfig) -> bool:
    minibatch = r.layout.rank_minibatch
    return not minibatch or (dispatched > 0 and dispatched % minibatch == 0)


def _divides(code: str, key: str, total: str, parts: str, when: _When = lambda r: True) -> Row:
    said = f"must divide the {{}} {parts}".format
    return Row(code, key, lambda n, r: attrgetter(total)(r) % n == 0, lambda r: said(attrgetter(total)(r)), when=when)


def _is_multiple(code: str, key: str, of: str, parts: str, when: _When = lambda r: True) -> Row:
    said = f"must be a multiple of the {{}} {parts}".format
    return Row(code, key, lambda n, r: n % attrgetter(of)(r) == 0, lambda r: said(attrgetter(of)(r)), when=when)


def _at_least(code: str, key: str, least: str, name: str, when: _When) -> Row:
    said = f"must be at least {name}, {{}}".format
    return Row(code, key, lambda n, r: n >= attrgetter(least)(r), lambda r: said(attrgetter(least)(r)), when=when)


#: The schema checks those of our keys.
SIZES: tuple[Row, ...] = tuple(
    Row("size", name, lambda size, _: size >= 1, "must be at least 1")
    for name in ("npus", "tp", "pp", "cp", "rollout_tp", "micro_batch", "mini_batch")
)
#: ``TransformerConfig.__post_init__``, Megatron's ``divide`` and ``validate_args``, ``_validate_resource``.
PARALLELISM: tuple[Row, ...] = (
    _divides("heads-groups", "query_groups", "heads", "attention heads", when=lambda r: r.grouped_queries),
    _divides("hidden-heads", "heads", "hidden", "rows of the hidden size"),
    _divides("tp-heads", "tp", "heads", "attention heads"),
    _divides("tp-groups", "tp", "kv_groups", "key/value groups"),
    _divides("tp-mlp", "tp", "ffn", "rows of the MLP's inner size"),
    _divides("tp-vocabulary", "tp", "vocab", "rows of the embedding"),
    _divides("pp-layers", "pp", "layers", "layers"),
    Row(
        "layout-npus",
        "tp",
        lambda _, r: r.layout.whole_ranks,
        lambda r: f"TP x PP x CP = {r.tp} x {r.pp} x {r.cp} = {r.layout.rank_devices} must divide the {r.npus} NPUs",
    ),
    _is_multiple("npus-nodes", "npus", "nodes", "nodes"),
    # TransformerConfig.__post_init__; its checkpointed forward pass takes more layers than there are for all of them.
    Row(
        "recompute",
        "recompute_layers",
        lambda layers, r: layers is not None and 1 <= layers <= r.layers // r.pp,
        lambda r: f"must be from 1 to the {r.layers // r.pp} layers of a pipeline stage",
        when=lambda r: r.recompute == "full",
    ),
)
_POLICY = "the confidence states the success rate of the policy's own distribution"
#: ``MegatronStyleVllmWeightContainer._validate_parallel_config``, ``qkv_split_weight``.
ROLLOUT: tuple[Row, ...] = (
    _divides("rollout-npus", "rollout_tp", "npus", "NPUs"),
    # The weight loader floors heads and groups by TP, so that a group is never shared between ranks.
    _divides("rollout-heads", "rollout_tp", "heads", "attention heads"),
    _divides("rollout-groups", "rollout_tp", "kv_groups", "groups"),
    Row(
        "rollout-training-tp",
        "rollout_tp",
        lambda tp, r: r.tp <= tp or r.tp % tp == 0,
        lambda r: f"must divide the training's TP {r.tp} if it is smaller",
    ),
    Row(
        "rollout-stage",
        "rollout_tp",
        lambda tp, r: r.tp >= tp or r.npus // r.pp % tp == 0,
        lambda r: f"above the training's TP {r.tp} must divide the {r.npus // r.pp} NPUs of a pipeline stage",
    ),
    # vLLM gives sample i of a prompt the seed + i: every prompt would be sampled with the same random numbers.
    Row("sampling-seed", "sampling_seed", (None,), "all prompts would share its noise"),
    Row("sampling-cut", "top_k", lambda k, _: k <= 0, f"must be -1: {_POLICY}"),
    Row("sampling-cut", "top_p", (1.0,), _POLICY),
    Row("sampling-cut", "min_p", (0.0,), _POLICY),
    # BaseTrainingEngine.forward_step divides the output of every pipeline stage by it, not only the logits.
    Row("temperature", "temperature", (1.0,), "pipeline stages divide by it", when=lambda r: r.pp != 1),
)
#: ``_validate_data_parallel``; minibatches and updates of whole groups.
BATCHES: tuple[Row, ...] = (
    _is_multiple("prompts-nodes", "prompts", "nodes", "nodes, each of which grades its share"),
    _is_multiple("prompts-dp", "prompts", "layout.ranks", "data-parallel ranks", when=lambda r: r.fills_npus),
    _is_multiple("prompts-engines", "prompts", "layout.engines", "rollout engines", when=lambda r: r.fills_npus),
    # BaseTrainingEngine floors mini_batch_size / dp: an update would be smaller than configured.
    _is_multiple("mini-batch-dp", "mini_batch", "layout.ranks", "data-parallel ranks", when=_whole_ranks),
    _divides("mini-batch", "mini_batch", "prompts", "prompts", when=_whole_ranks),
    _divides(
        "micro-batch", "micro_batch", "layout.rank_responses", "responses of a data-parallel rank", when=_whole_ranks
    ),
    # BaseTrainingEngine.update would make a smaller minibatch of the rest of every dispatch.
    Row(
        "dispatch-minibatch",
        "update_dispatch",
        _whole_dispatches,
        lambda r: f"must be a multiple of a rank's minibatch of {r.layout.rank_minibatch} responses",
        when=lambda r: _whole_ranks(r) and r.update_dispatch is not None,
    ),
    Row(
        "dispatch-rollout",
        "rollout_dispatch",
        lambda dispatched, r: r.layout.responses // r.layout.engines % dispatched == 0,
        lambda r: f"must divide the {r.layout.responses // r.layout.engines} responses of a rollout engine",
        when=lambda r: r.rollout_dispatch and r.fills_npus and r.prompts % r.layout.engines == 0,
    ),
    # ActorHybridWorkerBase.update takes one dispatch of each rank's share and no more.
    Row(
        "dispatch-order",
        "update_dispatch",
        lambda dispatched, r: dispatched == r.layout.rank_responses,
        lambda r: f"must be a rank's {r.layout.rank_responses} responses with guarantee_order",
        when=lambda r: _whole_ranks(r) and r.guarantee_order,
        optional=True,
    ),
)
_LONGEST = "the longest prompt and response"
#: The model's context, vLLM-Ascend's scheduler (vLLM's own splits prompts), ``rearrange_micro_batches``.
LENGTHS: tuple[Row, ...] = (
    Row(
        "context",
        "max_new",
        lambda _, r: r.layout.longest <= r.context,
        lambda r: f"with a prompt of {r.max_prompt} must fit the model's context of {r.context}",
    ),
    Row(
        "context",
        "max_model_len",
        lambda length, r: length <= r.context,
        lambda r: f"must be at most the model's context of {r.context}",
        when=lambda r: r.layout.longest <= r.context,
    ),
    # validate_config's ``seq_length``, which is that of the longest sequence.
    _at_least("model-length", "max_model_len", "layout.longest", _LONGEST, lambda r: r.layout.longest <= r.context),
    _at_least("batched-tokens", "max_batched_tokens", "max_model_len", "max_model_len", lambda r: r.ascend_scheduler),
    Row(
        "padding-dynamic", "remove_padding", (True,), "use_dynamic_bsz packs responses", when=lambda r: r.dynamic_batch
    ),
    _at_least("packing", "update_tokens", "layout.longest", _LONGEST, lambda r: r.dynamic_batch),
    _at_least("packing", "logprob_tokens", "layout.longest", _LONGEST, lambda r: r.dynamic_batch),
    _at_least(
        "packing",
        "reference_tokens",
        "layout.longest",
        _LONGEST,
        lambda r: r.dynamic_batch and r.kl_coefficient > 0,
    ),
)


def layout_problems(resolved: ResolvedConfig) -> list[Problem]:
    """Problems of the resolved configuration under its fields' names; if sizes are below 1, only those."""
    tables: tuple[tuple[Requirement[Any], ...], ...] = (PARALLELISM, ROLLOUT, BATCHES, LENGTHS)
    return find_problems(resolved, [required(SIZES)], [required(rows) for rows in tables])
