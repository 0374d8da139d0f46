"""Static plan of a cluster run: layout, iterations, time, memory, problems.

Time and memory are estimates that were not measured on an NPU.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

from coca_mindspeed.config.checks import steps_of_epochs, training_rows
from coca_mindspeed.config.plan import Part
from coca_mindspeed.config.schema import RunConfig
from coca_mindspeed.errors import ConfigError, DataError, Problem
from coca_mindspeed.mindspeed.checks import layout_problems, run_problems
from coca_mindspeed.mindspeed.resolved_config import KEYS, ResolvedConfig, resolve_config
from coca_mindspeed.mindspeed.start.run_file import StageFiles, mindspeed_values
from coca_mindspeed.utils.json_files import read_json_lines
from coca_mindspeed.utils.process import GIB

_SECONDS_PER_DAY = 86_400
BF16, FP32 = 2, 4  # bytes of a number


class Rates(NamedTuple):
    """Assumptions of the time estimate.

    Attributes:
        tokens_per_response: mean tokens of a prompt with its response; an assumption.
        tokens_per_second: of prompts and responses, that an NPU trains on, all stages together. MindSpeed-RL 2.3.0
            publishes (docs/algorithms/grpo.md) 220 for a card of an Atlas A3, which is two NPUs: Qwen2.5-7B, 32 prompts
            x 8 responses, 2,048 + 2,048 tokens; the figure for 32B is the same.
    """

    tokens_per_response: float = 750.0
    tokens_per_second: float = 110.0


# Layers, hidden size and inner size of the MLP of Qwen2.5-7B and 32B, whose rates are published.
_PUBLISHED = ((28, 3584, 18944), (64, 5120, 27648))


@dataclass(frozen=True, slots=True)
class NpuMemory:
    """The two phases of an iteration, which take turns on an NPU.

    Attributes:
        training: parts during the update, on the pipeline stage that needs most.
        rollout: parts during sampling; ``KV cache`` is the rest of vLLM's share.
        limit_gib: of an NPU, without the reserve.
        longest_responses: sequences of ``max_model_len`` tokens in the KV cache of a rollout engine.
    """

    training: tuple[Part, ...]
    rollout: tuple[Part, ...]
    limit_gib: float
    longest_responses: float

    @property
    def training_gib(self) -> float:
        return sum(part.bytes for part in self.training) / GIB

    @property
    def rollout_gib(self) -> float:
        return sum(part.bytes for part in self.rollout) / GIB


@dataclass(frozen=True, slots=True)
class ClusterPlan:
    """The plan of a run; ``memory`` is None on the CPU shim and if the layout has problems.

    ``rows`` is the number of training questions, ``rows_from`` its origin, ``iterations`` that of each stage; None if
    unknown.
    """

    resolved: ResolvedConfig
    memory: NpuMemory | None
    rows: int | None
    rows_from: str
    iterations: int | None
    problems: tuple[Problem, ...] = ()


def make_plan(run: RunConfig) -> ClusterPlan:
    """Plan a run for Ascend.

    Raises ConfigError if it is for no cluster or a key has the wrong type, DataError for an unreadable training file.
    """
    resolved = resolve_config(run)
    fits_layout = run.hardware.platform == "npu" and not any(layout_problems(resolved))
    memory = npu_memory(resolved) if fits_layout else None
    rows, rows_from = training_rows(run.data)
    iterations: int | None = run.trainer.steps
    problems: list[Problem] = []
    if run.data.epochs is not None:
        try:
            iterations = None if rows is None else steps_of_epochs(run.data.epochs, rows, run.rollout.prompts)
        except ConfigError as error:
            iterations, problems = None, error.problems
    # The number of iterations and the directory are unknown to the conditions; any do.
    values = partial(mindspeed_values, run, iterations or 1, StageFiles(Path("runs")))
    problems += run_problems(run, resolved, values)
    if memory is not None:
        problems += _memory_problems(resolved, memory)
    return ClusterPlan(resolved, memory, rows, rows_from, iterations, tuple(problems))


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


def published_rates(resolved: ResolvedConfig) -> Rates | None:
    """The published rates of the run's model; None if there are none, for other sizes train at other rates."""
    return Rates() if (resolved.layers, resolved.hidden, resolved.ffn) in _PUBLISHED else None


def iteration_seconds(resolved: ResolvedConfig, rates: Rates) -> float:
    """Estimate the time of an iteration, in proportion to its tokens and against the number of its NPUs."""
    return resolved.responses * rates.tokens_per_response / (resolved.npus * rates.tokens_per_second)


def run_days(resolved: ResolvedConfig, iterations: int, rates: Rates) -> float:
    """Estimate the days of a run; ``iterations`` of all stages together."""
    return iterations * iteration_seconds(resolved, rates) / _SECONDS_PER_DAY


def checkpoint_bytes(resolved: ResolvedConfig) -> int:
    """One Megatron checkpoint: weights in bfloat16, and the optimizer's weights and two moments in float32."""
    return (BF16 + 3 * FP32) * model_parameters(resolved)


def most_checkpoints(resolved: ResolvedConfig, iterations: int | None, stages: int) -> float:
    """Most checkpoints on disk at once, with one that is being written; ``iterations`` (None: unknown) of a stage.

    Infinity if all are kept and the number of iterations is unknown.
    """
    written = math.inf if iterations is None else -(-iterations // max(1, resolved.save_interval))
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


def npu_memory(resolved: ResolvedConfig) -> NpuMemory:
    """Estimate both phases, by the formulas of docs/ascend.md; the layout must have no problems."""
    # (is first, is last) of the pipeline stages that can need most
    stages = ((True, True),) if resolved.pp == 1 else ((True, False), (False, True))
    training = max((_training(resolved, *ends) for ends in stages), key=lambda parts: sum(part.bytes for part in parts))
    rollout = _rollout(resolved, training)
    kv = next(part.bytes for part in rollout if part.name == "KV cache")
    return NpuMemory(
        training,
        rollout,
        resolved.memory_gib - resolved.reserved_gib,
        max(0.0, kv) / (kv_bytes_per_token(resolved, resolved.rollout_tp) * resolved.max_model_len),
    )


def _training(resolved: ResolvedConfig, first: bool, last: bool) -> tuple[Part, ...]:
    embeddings = first + (last and (resolved.untied_embeddings or resolved.pp > 1))  # tied ones are kept at both ends
    layers = resolved.layers // resolved.pp
    parameters = (layers * layer_parameters(resolved) + embeddings * resolved.vocab * resolved.hidden) / resolved.tp
    shards = resolved.dp * resolved.cp if resolved.distributed_optimizer else 1
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


def _activations(resolved: ResolvedConfig, layers: int) -> float:
    """Bytes that the backward pass of ``layers`` layers keeps of one microbatch, with flash attention."""
    kv = resolved.kv_groups * (resolved.hidden // resolved.heads)
    # bf16: both norms' inputs, inputs of QKV and MLP; queries, attention's output; keys and values; gate, up, product
    outside, inside = 4 * resolved.hidden, 2 * resolved.hidden + 2 * kv + 3 * resolved.ffn
    per_token = BF16 * (outside / (resolved.tp if resolved.sequence_parallel else 1) + inside / resolved.tp)
    if resolved.recompute != "full":
        return resolved.microbatch_tokens * per_token * layers
    kept = BF16 * resolved.hidden / (resolved.tp if resolved.sequence_parallel else 1)
    return resolved.microbatch_tokens * (kept * layers + per_token)


def _rollout(resolved: ResolvedConfig, training: tuple[Part, ...]) -> tuple[Part, ...]:
    stays = {"weights": not resolved.offload_param, "gradients": not resolved.offload_grad}
    stays["optimizer"] = not resolved.offload_optimizer
    resident = sum(part.bytes for part in training if stays.get(part.name, False))
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
    shards = resolved.dp * resolved.cp if resolved.distributed_optimizer else 1
    of_a_rank = parameters / (resolved.tp * resolved.pp)
    per_rank = BF16 * parameters / resolved.rollout_tp
    per_rank += BF16 * of_a_rank if resolved.offload_param else 0
    per_rank += 3 * FP32 * of_a_rank / shards if resolved.offload_optimizer else 0
    return per_rank * resolved.npus / resolved.nodes / GIB


def _memory_problems(resolved: ResolvedConfig, memory: NpuMemory) -> Iterator[Problem]:
    limit = f"GiB of an NPU's {memory.limit_gib:.1f}"
    parallel = f"raise {KEYS['tp']} or {KEYS['pp']}"
    if memory.training_gib > memory.limit_gib:
        name, reason = "micro_batch", f"training needs about {memory.training_gib:.1f} {limit}"
        if resolved.dynamic_batch:
            name = "update_tokens"
        yield Problem("memory-training", KEYS[name], getattr(resolved, name), reason, f"lower it, or {parallel}")
    if memory.rollout_gib > memory.limit_gib:
        name, reason = "memory_utilization", f"rollout needs about {memory.rollout_gib:.1f} {limit}"
        yield Problem("memory-rollout", KEYS[name], resolved.memory_utilization, reason, "lower it")
    if memory.longest_responses < 1:
        reason = f"the KV cache holds {memory.longest_responses:.2f} sequences of {resolved.max_model_len} tokens"
        fix = f"raise it, or {KEYS['memory_utilization']}"
        yield Problem("memory-kv-cache", KEYS["rollout_tp"], resolved.rollout_tp, reason, fix)
