"""Estimate the memory of an NPU, part by part. No estimate was compared with an NPU."""

from dataclasses import dataclass

from coca_mindspeed.config.model_size import (
    BF16,
    FP32,
    GIB,
    Part,
    kv_bytes_per_token,
    layer_parameters,
    model_parameters,
)
from coca_mindspeed.mindspeed.resolved_config import ResolvedConfig


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
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
        return sum(part.gib for part in self.training)

    @property
    def rollout_gib(self) -> float:
        return sum(part.gib for part in self.rollout)

    @property
    def fits(self) -> bool:
        return max(self.training_gib, self.rollout_gib) <= self.limit_gib and self.longest_responses >= 1


def checkpoint_bytes(resolved: ResolvedConfig) -> int:
    """One Megatron checkpoint: weights in bfloat16, and the optimizer's weights and two moments in float32."""
    return (BF16 + 3 * FP32) * model_parameters(resolved)


def estimate_memory(resolved: ResolvedConfig) -> MemoryEstimate:
    """Estimate both phases; the layout must have no problems (:mod:`~coca_mindspeed.mindspeed.checks`)."""
    training = max(
        (_training(resolved, stage) for stage in _stages(resolved)), key=lambda parts: sum(p.bytes for p in parts)
    )
    rollout = _rollout(resolved, training)
    kv = next(part.bytes for part in rollout if part.name == "KV cache")
    return MemoryEstimate(
        training,
        rollout,
        resolved.memory_gib - resolved.reserved_gib,
        max(0.0, kv) / (kv_bytes_per_token(resolved, resolved.rollout_tp) * resolved.max_model_len),
    )


def _stages(resolved: ResolvedConfig) -> tuple[tuple[bool, bool], ...]:
    """``(is first, is last)`` of the pipeline stages that can need most."""
    return ((True, True),) if resolved.pp == 1 else ((True, False), (False, True))


def _training(resolved: ResolvedConfig, stage: tuple[bool, bool]) -> tuple[Part, ...]:
    first, last = stage
    embeddings = int(first) + int(
        last and (resolved.untied_embeddings or resolved.pp > 1)
    )  # tied ones are kept at both ends
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
