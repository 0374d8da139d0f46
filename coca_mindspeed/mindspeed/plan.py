"""The plan of a cluster run: layout, batches, iterations, time, memory, problems.

Time and memory are estimates that were not measured on an NPU.
"""

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from coca_mindspeed.config.checks import missing_data
from coca_mindspeed.config.compose import ComposedConfig
from coca_mindspeed.config.plan import Part, Phase, Plan, Row, batch_rows, evaluations, file_rows, show_plan
from coca_mindspeed.config.preflight import Names, preflight
from coca_mindspeed.config.run_marker import read_run_marker
from coca_mindspeed.config.schema import RunConfig
from coca_mindspeed.config.unusual import late_checkpoint, unusual_values
from coca_mindspeed.errors import DataError, Problem, raise_problems, show_value
from coca_mindspeed.mindspeed.checks import changed_keys, ignored_keys, run_problems
from coca_mindspeed.mindspeed.cluster_run import ClusterRun
from coca_mindspeed.mindspeed.keys import SET_FOR_NATIVE_RUNS, actor_values, underscored
from coca_mindspeed.mindspeed.requirements import MindSpeedView
from coca_mindspeed.mindspeed.resolved_config import KEYS, ResolvedConfig
from coca_mindspeed.mindspeed.upstream_keys import OWN_VERIFIER
from coca_mindspeed.utils.console import print_text
from coca_mindspeed.utils.json_files import read_json_lines
from coca_mindspeed.utils.process import GIB
from coca_mindspeed.utils.text_formats import value_of

_SECONDS_PER_DAY = 86_400
_IS_THRESHOLD = "coca.rollout_is_threshold"
BF16, FP32 = 2, 4  # bytes of a number
_GRAPH_MODE = (
    "graph mode (enforce_eager=false), not tried on an NPU: the run sets TASK_QUEUE_ENABLE=1; every wake-up of vLLM "
    "repeats the capture, and may replay graphs with addresses of freed weights: rollout/log_prob_gap must stay as in "
    "eager mode (docs/ascend_reference.md, graph mode)"
)


class Rates(NamedTuple):
    """Assumptions of the time estimate: mean tokens of a prompt with its response, and tokens an NPU trains on."""

    tokens_per_response: float
    tokens_per_second: float


# Layers, hidden size and inner size of the MLP of Qwen2.5-7B and 32B, whose rate MindSpeed-RL 2.3.0 publishes
# (docs/algorithms/grpo.md): 220 tokens/s, all stages together, for a card of an Atlas A3, which is two NPUs.  The mean
# length is an assumption.
_PUBLISHED = ((28, 3584, 18944), (64, 5120, 27648))
_UNPUBLISHED = "no rate is published for this model; measure one by --trial, and plan with --metrics FILE"
PUBLISHED_RATES = Rates(tokens_per_response=750.0, tokens_per_second=110.0)


@dataclass(frozen=True, kw_only=True)
class ClusterPlan(Plan):
    """The plan of a cluster run; it has no memory on the CPU shim and if the layout has problems."""

    start: ClusterRun

    @property
    def resolved(self) -> ResolvedConfig:
        return self.start.resolved

    @property
    def iterations(self) -> int | None:
        """The length of each stage; None if it is unknown."""
        return self.start.iterations


def make_plan(run: RunConfig, name: str = "a run", metrics: Path | None = None) -> ClusterPlan:
    """Plan a run for Ascend; ``metrics`` of an earlier run (``metrics.jsonl``) give the rates of the time estimate.

    Raises ConfigError if it is for no cluster, a key has the wrong type or ``metrics`` are another run's; DataError for
    an unreadable training file or one of metrics.
    """
    start = ClusterRun(run)
    resolved, on_npus = start.resolved, run.hardware.platform == "npu"
    rates = _published_rates(resolved) or _UNPUBLISHED if metrics is None else _measured_rates(start, metrics)
    memory = npu_memory(resolved) if on_npus and not start.layout_problems else ()
    problems = (*start.length.problems, *run_problems(start), *_memory_problems(start, memory))
    rows, warnings = tuple(_rows(start, rates)), tuple(_warnings(start))
    notes = (*_notes(resolved, memory), *start.model.notes, *_upstreams_own(run), *_native_notes(start))
    files = (start.key("data.train"), run.data.train), (start.key("data.evaluate"), run.data.evaluate)
    names = Names(start.key("method") + "=coca_stable", start.key("rollout.max_new_tokens"), *files)
    plan = preflight(
        name,
        run.method,
        names,
        resolved.layout,
        problems=problems,
        questions=lambda: start.questions,
        memory=memory,
        rows=rows,
        notes=notes,
        warnings=warnings,
    )
    return ClusterPlan(**vars(plan), start=start)


def _warnings(start: ClusterRun) -> Iterator[Problem]:
    """Values that hardly any run means."""
    run, key = start.run, start.key
    of_optimizer = ("lr", "grad_clip", "weight_decay", "betas")
    values = {name: (f"optimizer.{name}", getattr(run.optimizer, name)) for name in of_optimizer}
    values |= {
        "clip": ("method.clip", run.method.clip),
        "seconds": ("data.grader_options.seconds", run.data.grader_options.get("seconds")),
        "max_new_tokens": ("rollout.max_new_tokens", run.rollout.max_new_tokens),
        "is_threshold": (f"mindspeed_rl.{_IS_THRESHOLD}", value_of(start.values, _IS_THRESHOLD)),
    }
    yield from unusual_values({name: (key(ours), value) for name, (ours, value) in values.items()})
    yield from late_checkpoint(key("checkpoint.interval"), run.checkpoint.interval, start.iterations)


def _native_notes(start: ClusterRun) -> Iterator[str]:
    """Notes on keys without effect, or that the run sets, of a file in MindSpeed-RL's layout."""
    if not start.native:
        return
    if ignored := [problem.key for problem in ignored_keys(MindSpeedView(start.run.mindspeed_rl))]:
        yield f"no effect: {', '.join(ignored)}"
    yield f"set by the run: {', '.join((*SET_FOR_NATIVE_RUNS, 'actor_config.save'))}"


def show_plan_of(composed: ComposedConfig, metrics: Path | None = None, *, quiet: bool = False) -> ClusterPlan:
    """Plan a composed run, print the plan, and return it if it has no problems; raises as :func:`make_plan`."""
    plan = make_plan(composed.run, composed.name, metrics)
    train = plan.start.key("data.train")
    for problem in missing_data(composed.run, plan.start.key):
        if problem.key == train:
            print_text(f"warning: {problem}", sys.stderr)
    show_plan(plan, quiet=quiet)
    return plan


def _rows(start: ClusterRun, rates: Rates | str) -> Iterator[Row]:
    """The values that the run file gives to MindSpeed-RL's keys, and what follows from them."""
    r, layout, stages = start.resolved, start.resolved.layout, start.stages
    iterations, questions, origin, _ = start.length
    length = "unknown: data.train does not exist; data.rows=N plans without it"
    if iterations is not None:
        length = f"{iterations:,} a stage"
        length += f" ({questions:,} questions by {origin})" if questions else ""
    dp, engines, slots = (layout.ranks, layout.engines, _slots(start)) if r.fills_npus else ("?", "?", "?")
    run = start.run
    yield "method", run.method.name
    yield "learning rate", f"{r.lr:g}"
    files = {"data.train": run.data.train, "data.evaluate": run.data.evaluate, "model.path": run.model.path}
    yield from file_rows({**{start.key(key): path for key, path in files.items()}, "weights": r.load})
    yield "NPUs", f"{r.npus} on {r.nodes} node{'s' * (r.nodes > 1)}, {r.memory_gib:g} GiB each"
    yield "model", f"{model_parameters(r) / 1e9:.2f} billion parameters, {r.layers} layers"
    yield "training", f"TP {r.tp} x PP {r.pp} x CP {r.cp} x DP {dp}"
    yield "rollout", f"{engines} engines of TP {r.rollout_tp}"
    yield "slots per engine", slots
    yield from batch_rows("iteration", layout)
    yield "grader", ", ".join(MindSpeedView(start.values).verifiers).replace(OWN_VERIFIER, run.data.grader)
    yield "microbatches", f"up to {r.update_tokens} tokens" if r.dynamic_batch else f"{r.micro_batch} responses"
    yield "tokens", f"{r.max_prompt} + {r.max_new} at most; {layout.responses * r.max_new:,} new ones per iteration"
    yield "iterations", length
    yield "time", _time(start, rates) if r.npus > 0 else "?"
    host = f"{host_gib(r):.0f}" if r.fills_npus else "?"
    yield "host memory", f"about {host} GiB a node, without Ray's object store and the data"
    yield "validation", evaluations(start.run, "iterations", start.key("data.evaluate")) + _asked(start)
    size, most = checkpoint_bytes(r) / 1e9, most_checkpoints(r, iterations, stages)
    kept = "all" if r.keep_checkpoints is None else f"the newest {r.keep_checkpoints}"
    clock = "" if r.save_minutes is None else f" and every {r.save_minutes:g} minutes"
    checkpoints = f"{size:.1f} GB every {r.save_interval} iterations{clock}, {kept} of a stage are kept"
    yield "checkpoints", f"{checkpoints}, at most {most * size:.0f} GB at once"


def _slots(start: ClusterRun) -> str:
    r = start.resolved
    shown = f"{r.max_sequences} for {r.engine_responses} responses"
    waves = -(-r.engine_responses // max(1, r.max_sequences))
    if waves <= 1:
        return shown
    return f"{shown}: {waves} waves; raise {start.key(KEYS['max_sequences'])} to avoid waiting between waves"


def _notes(resolved: ResolvedConfig, memory: Sequence[Phase]) -> Iterator[str]:
    if memory:
        held = f"{longest_responses(resolved, memory):.0f} sequences of {resolved.max_model_len} tokens"
        yield f"KV cache per rollout engine: {held}; estimates, not measured on an NPU (docs/ascend_reference.md)"
    if not resolved.enforce_eager:
        yield _GRAPH_MODE


def _upstreams_own(run: RunConfig) -> Iterator[str]:
    """MindSpeed-RL's own keys, which the run passes on, that differ from its defaults."""
    changed = changed_keys(MindSpeedView(run.mindspeed_rl), "upstream")
    if shown := ", ".join(f"{key}={show_value(value)} ({show_value(default)})" for key, value, default in changed):
        yield f"MindSpeed-RL's own keys that differ from its defaults (in brackets): {shown}"


def read_rates(path: Path) -> Rates:
    """Mean rates of the iterations in an earlier run's ``metrics.jsonl``.

    Raises DataError if it cannot be read, or a row lacks what MindSpeed-RL logs.
    """
    rows = []
    for number, row in read_json_lines(path):
        values = [row.get(name) for name in ("prompt_length/mean", "response_length/mean", "e2e_tps")]
        if not all(isinstance(value, int | float) and value > 0 for value in values):
            names = "prompt_length/mean, response_length/mean and e2e_tps of MindSpeed-RL"
            raise DataError(f"{path}:{number}: expected numbers above 0 for {names}, found {values}")
        rows.append(values)
    if not rows:
        raise DataError(f"{path}: holds no iteration")
    prompt, response, rate = (sum(column) / len(rows) for column in zip(*rows, strict=True))
    return Rates(prompt + response, rate)


def _measured_rates(start: ClusterRun, metrics: Path) -> Rates | str:
    """The rates in ``metrics``, or why they cannot be used: the run file beside them does not say whose they are.

    Raises ConfigError if they are of another model, of other NPUs or of the CPU shim; and as :func:`read_rates`.
    """
    rates, marker = read_rates(metrics), read_run_marker(metrics.parent, "mindspeed_rl")
    theirs, ours = _measured_by({} if marker is None else marker.settings), _measured_by(start.values)
    if absent := [key for key in ours if theirs[key] is None and ours[key] is not None]:
        return (
            f"{metrics.parent} does not say by which model and NPUs {metrics.name} was measured ({', '.join(absent)})"
        )
    different = [f"{key} {theirs[key]} (here: {ours[key]})" for key in ours if theirs[key] != ours[key]]
    if different:
        reason = f"must be of this run's model and NPUs, found {', '.join(different)}"
        raise_problems([Problem("other-run", "--metrics", str(metrics), reason, "measure this run by --trial")])
    return rates


def _measured_by(values: dict[str, Any]) -> dict[str, Any]:
    """Keys of MindSpeed-RL's that decide the rate of a run besides its layout: model and hardware."""
    actor = actor_values(underscored(values))
    sizes = ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups")
    hardware = ("coca.platform", "coca.npu_memory_gib")
    return {name: actor.get(name) for name in sizes} | {key: value_of(values, key) for key in hardware}


def _published_rates(resolved: ResolvedConfig) -> Rates | None:
    """None for a model without published rates, because other sizes train at other rates."""
    return PUBLISHED_RATES if (resolved.layers, resolved.hidden, resolved.ffn) in _PUBLISHED else None


def iteration_seconds(resolved: ResolvedConfig, rates: Rates) -> float:
    """Estimate the time of an iteration, in proportion to its tokens and against the number of its NPUs."""
    return resolved.layout.responses * rates.tokens_per_response / (resolved.npus * rates.tokens_per_second)


def _asked(start: ClusterRun) -> str:
    if not start.validation_responses:
        return ""
    share = start.validation_responses / (start.iterations or 1) / start.stages / start.resolved.layout.responses
    shown = f"{start.validations} in all, of {start.held_out:,} questions"
    return f": {shown}, {start.validation_responses:,} responses, {share:.2g} of the training's"


def _time(start: ClusterRun, rates: Rates | str) -> str:
    """The time of an iteration, and of all with the validations; ``rates`` may say why it is unknown.

    A validation's response counts as one of training, although nothing is trained on it: at most so long.
    """
    resolved, iterations = start.resolved, start.iterations
    if isinstance(rates, str):
        return f"unknown: {rates}"
    seconds, whole = iteration_seconds(resolved, rates), ""
    if iterations is not None:
        tests = start.validation_responses / resolved.layout.responses
        days = (iterations * start.stages + tests) * seconds / _SECONDS_PER_DAY
        whole = f", {days:.1f} days" if days >= 1 else f", {24 * days:.2g} hours"
        whole += f" with {start.validations} validations" if tests else ""
    assumed = f"{rates.tokens_per_response:.0f} tokens a response and {rates.tokens_per_second:.0f} tokens/s per NPU"
    return f"about {seconds:.0f} s an iteration{whole}; at {assumed}"


def checkpoint_bytes(resolved: ResolvedConfig) -> int:
    """One Megatron checkpoint: weights in bfloat16, and the optimizer's weights and two moments in float32."""
    return (BF16 + 3 * FP32) * model_parameters(resolved)


def most_checkpoints(resolved: ResolvedConfig, iterations: int | None, stages: int) -> float:
    """Most checkpoints on disk at once, with one that is being written; ``iterations`` (None: unknown) of a stage.

    Infinity if all are kept and the number of iterations is unknown.
    """
    interval = max(1, resolved.save_interval) if resolved.save_minutes is None else 1
    written = math.inf if iterations is None else -(-iterations // interval)
    kept = min(written, resolved.keep_checkpoints or math.inf)
    return stages * kept + (written > kept)


def layer_parameters(run: ResolvedConfig) -> int:
    """Parameters of one layer: attention with grouped keys and values, gated MLP, RMSNorms."""
    head = run.hidden // run.heads
    kv = run.kv_groups * head
    qkv = run.hidden * (run.hidden + 2 * kv) + (run.hidden + 2 * kv if run.qkv_bias else 0)
    qkv += 2 * head if run.qk_layernorm else 0
    return qkv + run.hidden * run.hidden + 3 * run.hidden * run.ffn + 2 * run.hidden


def model_parameters(run: ResolvedConfig) -> int:
    """Parameters of the whole model."""
    embeddings = run.vocab * run.hidden * (2 if run.untied_embeddings else 1)
    return run.layers * layer_parameters(run) + embeddings + run.hidden


def kv_bytes_per_token(run: ResolvedConfig, tensor_parallel: int) -> float:
    """Bytes of one token's keys and values in bfloat16, on one of ``tensor_parallel`` devices."""
    return 2 * BF16 * run.layers * run.kv_groups * (run.hidden // run.heads) / tensor_parallel


def npu_memory(resolved: ResolvedConfig) -> tuple[Phase, ...]:
    """The phases of an iteration, which take turns on an NPU: training, log-probs if they have a pass of their own, and
    rollout; the layout must have no problems.

    By the formulas of docs/ascend_reference.md.  Training is that of the pipeline stage that needs most; in the
    rollout, the KV cache is the rest of vLLM's share.
    """
    # (is first, is last) of the pipeline stages that can need most
    ends = ((True, True),) if resolved.pp == 1 else ((True, False), (False, True))
    limit = resolved.memory_gib - resolved.reserved_gib

    def largest(name: str, parts: Callable[[ResolvedConfig, bool, bool], tuple[Part, ...]]) -> Phase:
        return max((Phase(name, parts(resolved, *end), limit) for end in ends), key=lambda phase: phase.gib)

    training = largest("training", _training)
    forward = [largest("log-probs", _log_probs)] if resolved.forward_tokens else []
    return training, *forward, Phase("rollout", _rollout(resolved, training), limit)


def longest_responses(resolved: ResolvedConfig, memory: Sequence[Phase]) -> float:
    """Sequences of ``max_model_len`` tokens in the KV cache of a rollout engine."""
    cache = max(0.0, memory[-1].bytes_of("KV cache"))
    return cache / (kv_bytes_per_token(resolved, resolved.rollout_tp) * resolved.max_model_len)


def _training(resolved: ResolvedConfig, first: bool, last: bool) -> tuple[Part, ...]:
    embeddings = first + (last and (resolved.untied_embeddings or resolved.pp > 1))  # tied ones are kept at both ends
    layers = resolved.layers // resolved.pp
    parameters = (layers * layer_parameters(resolved) + embeddings * resolved.vocab * resolved.hidden) / resolved.tp
    shards = resolved.layout.ranks * resolved.cp if resolved.distributed_optimizer else 1
    in_flight = resolved.pp if first else 1  # microbatches whose backward pass is still to come
    parts = [
        Part("weights", BF16 * parameters, "2 bytes x parameters of a rank"),
        Part("gradients", FP32 * parameters, "4 bytes x parameters of a rank"),
        Part("optimizer", 3 * FP32 * parameters / shards, "12 bytes x parameters of a rank / (DP x CP)"),
        Part(
            "activations",
            in_flight * _activations(resolved, layers),
            f"{resolved.microbatch_tokens} tokens x {layers} layers x microbatches in flight ({in_flight})",
        ),
    ]
    if last:
        logits = resolved.microbatch_tokens * resolved.vocab / resolved.tp * (2 * BF16 + 2 * FP32)
        parts.append(Part("logits", logits, "12 bytes x tokens x vocabulary / TP"))
    if resolved.kl_coefficient > 0:
        parts.append(Part("reference model", BF16 * parameters, "2 bytes x parameters of a rank"))
    return tuple(parts)


def _log_probs(resolved: ResolvedConfig, first: bool, last: bool) -> tuple[Part, ...]:
    """A forward pass, which keeps the activations of one layer."""
    tokens = resolved.forward_tokens
    held = {part.name: part for part in _training(resolved, first, last)}
    stays = {"weights": True, "gradients": not resolved.offload_grad, "optimizer": not resolved.offload_optimizer}
    logits = tokens * resolved.vocab / resolved.tp * (2 * BF16 + FP32) if last else 0
    return (
        *(held[name] for name, stay in stays.items() if stay),
        Part("activations", tokens * _layer_bytes(resolved), f"{tokens} tokens x 1 layer"),
        Part("logits", logits, "8 bytes x tokens x vocabulary / TP"),
    )


def _activations(resolved: ResolvedConfig, layers: int) -> float:
    """Bytes that the backward pass of ``layers`` layers keeps of one microbatch, with flash attention.

    Of recomputed layers it keeps the input: of the first ``recompute_layers`` alone (``block``), or of each group of as
    many layers, which is then computed at once (``uniform``).
    """
    per_token, again = _layer_bytes(resolved), min(resolved.recompute_layers or 1, layers)
    kept = BF16 * resolved.hidden / (resolved.tp if resolved.sequence_parallel else 1)
    if resolved.recompute != "full":
        bytes_of_token = per_token * layers
    elif resolved.recompute_method == "block":
        bytes_of_token = kept * again + per_token * max(1, layers - again)
    else:
        bytes_of_token = kept * -(-layers // again) + per_token * again
    return resolved.microbatch_tokens * bytes_of_token


def _layer_bytes(resolved: ResolvedConfig) -> float:
    """Bytes of a token's activations in one layer."""
    kv = resolved.kv_groups * (resolved.hidden // resolved.heads)
    # bf16: both norms' inputs, inputs of QKV and MLP; queries, attention's output; keys and values; gate, up, product
    outside, inside = 4 * resolved.hidden, 2 * resolved.hidden + 2 * kv + 3 * resolved.ffn
    return BF16 * (outside / (resolved.tp if resolved.sequence_parallel else 1) + inside / resolved.tp)


def _rollout(resolved: ResolvedConfig, training: Phase) -> tuple[Part, ...]:
    stays = {"weights": not resolved.offload_param, "gradients": not resolved.offload_grad}
    stays["optimizer"] = not resolved.offload_optimizer
    resident = sum(training.bytes_of(name) for name, stay in stays.items() if stay)
    weights = BF16 * model_parameters(resolved) / resolved.rollout_tp
    batch = resolved.max_batched_tokens * BF16 * (4 * resolved.hidden + 3 * resolved.ffn / resolved.rollout_tp)
    sampling = resolved.max_sequences * resolved.vocab * 2 * FP32
    share, outside = resolved.memory_utilization * resolved.memory_gib * GIB, resolved.reserved_gib * GIB
    return (
        Part("training state not offloaded", resident, "generate_config.offload_train_*"),
        Part("rollout weights", weights, "2 bytes x parameters / rollout TP"),
        Part(
            "rollout activations", batch + sampling, "max_num_batched_tokens, and max_num_seqs x vocabulary x 8 bytes"
        ),
        Part("outside of torch", outside, "hardware.reserved_gib, which vLLM-Ascend takes off its share"),
        Part("KV cache", share - weights - batch - sampling - outside, "the rest of gpu_memory_utilization x memory"),
    )


def host_gib(resolved: ResolvedConfig) -> float:
    """GiB of one node's host memory that a run fills before Ray's object store and the data.

    While responses are sampled, the weights and the optimizer's state of training wait in host memory; each rank also
    keeps the copy of vLLM's weights that is loaded at every wake-up.
    """
    parameters = model_parameters(resolved)
    shards = resolved.layout.ranks * resolved.cp if resolved.distributed_optimizer else 1
    of_a_rank = parameters / (resolved.tp * resolved.pp)
    per_rank = BF16 * parameters / resolved.rollout_tp
    per_rank += BF16 * of_a_rank if resolved.offload_param else 0
    per_rank += 3 * FP32 * of_a_rank / shards if resolved.offload_optimizer else 0
    return per_rank * resolved.npus / resolved.nodes / GIB


def _memory_problems(start: ClusterRun, memory: Sequence[Phase]) -> Iterator[Problem]:
    if not memory:
        return
    resolved, keys = start.resolved, {name: start.key(key) for name, key in KEYS.items()}
    training, *forward, rollout = memory
    limit = f"GiB of an NPU's {training.limit_gib:.1f}"
    parallel = f"raise {keys['tp']} or {keys['pp']}"
    if training.gib > training.limit_gib:
        name, reason = "micro_batch", f"training needs about {training.gib:.1f} {limit}"
        if resolved.dynamic_batch:
            name = "update_tokens"
        yield Problem("memory-training", keys[name], getattr(resolved, name), reason, f"lower it, or {parallel}")
    for phase in forward:
        if phase.gib > phase.limit_gib:
            sizes = {name: getattr(resolved, name) for name in ("logprob_tokens", "reference_tokens")}
            name = max(sizes, key=lambda name: sizes[name]) if resolved.dynamic_batch else "micro_batch"
            reason = f"the pass for log-probs needs about {phase.gib:.1f} {limit}"
            yield Problem("memory-log-probs", keys[name], getattr(resolved, name), reason, f"lower it, or {parallel}")
    if rollout.gib > rollout.limit_gib:
        name, reason = "memory_utilization", f"rollout needs about {rollout.gib:.1f} {limit}"
        yield Problem("memory-rollout", keys[name], resolved.memory_utilization, reason, "lower it")
    if (held := longest_responses(resolved, memory)) < 1:
        reason = f"the KV cache holds {held:.2f} sequences of {resolved.max_model_len} tokens"
        fix = f"raise it, or {keys['memory_utilization']}"
        yield Problem("memory-kv-cache", keys["rollout_tp"], resolved.rollout_tp, reason, fix)
