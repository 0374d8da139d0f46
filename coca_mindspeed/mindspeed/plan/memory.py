"""How much of an NPU's memory a run needs, part by part.  Estimates: docs/ascend.md states the formulas.

The sizes of weights, gradients and optimizer state follow from the shapes; activations count what a backward pass
keeps; what CANN, HCCL and fragmentation take is a reserve.  None of it was measured on an NPU.
"""

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
from coca_mindspeed.mindspeed.plan.resolved_config import RunFacts


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The two phases of an iteration, which share an NPU in turn.

    Attributes:
        training: parts during the update, on the pipeline stage that needs most.
        rollout: parts while responses are sampled; ``KV cache`` is what is left of vLLM's share.
        limit_gib: of an NPU, without the reserve.
        longest_responses: how many sequences of ``max_model_len`` tokens the KV cache of a rollout engine holds.
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


def checkpoint_bytes(facts: RunFacts) -> int:
    """One Megatron checkpoint: weights in bfloat16, and the optimizer's weights and two moments in float32."""
    return (BF16 + 3 * FP32) * model_parameters(facts)


def memory_plan(facts: RunFacts) -> MemoryPlan:
    """Memory of both phases; the layout must satisfy :func:`~coca_mindspeed.mindspeed.plan.rules.violations`."""
    training = max((_training(facts, stage) for stage in _stages(facts)), key=lambda parts: sum(p.bytes for p in parts))
    rollout = _rollout(facts, training)
    kv = next(part.bytes for part in rollout if part.name == "KV cache")
    return MemoryPlan(
        training,
        rollout,
        facts.memory_gib - facts.reserved_gib,
        max(0.0, kv) / (kv_bytes_per_token(facts, facts.rollout_tp) * facts.max_model_len),
    )


def _stages(facts: RunFacts) -> tuple[tuple[bool, bool], ...]:
    """``(is first, is last)`` of the pipeline stages that can need most."""
    return ((True, True),) if facts.pp == 1 else ((True, False), (False, True))


def _training(facts: RunFacts, stage: tuple[bool, bool]) -> tuple[Part, ...]:
    first, last = stage
    embeddings = int(first) + int(last and (facts.untied_embeddings or facts.pp > 1))  # tied ones are kept at both ends
    layers = facts.layers // facts.pp
    parameters = (layers * layer_parameters(facts) + embeddings * facts.vocab * facts.hidden) / facts.tp
    shards = facts.dp * facts.cp if facts.distributed_optimizer else 1
    in_flight = facts.pp if first else 1  # microbatches whose backward pass is still to come
    parts = [
        Part("weights", BF16 * parameters, "2 bytes x parameters of a rank"),
        Part("gradients", FP32 * parameters, "4 bytes x parameters of a rank"),
        Part("optimizer", 3 * FP32 * parameters / shards, "12 bytes x parameters of a rank / (DP x CP)"),
        Part(
            "activations",
            in_flight * _activations(facts, layers),
            f"{facts.microbatch_tokens} tokens x {layers} layers x microbatches in flight ({in_flight})",
        ),
    ]
    if last:
        logits = facts.microbatch_tokens * facts.vocab / facts.tp * (2 * BF16 + 2 * FP32)
        parts.append(Part("logits", logits, "12 bytes x tokens x vocabulary / TP"))
    if facts.kl_coefficient > 0:
        parts.append(Part("reference model", BF16 * parameters, "2 bytes x parameters of a rank"))
    return tuple(parts)


def _activations(facts: RunFacts, layers: int) -> float:
    """What the backward pass of ``layers`` layers keeps of one microbatch, in bytes, with flash attention."""
    kv = facts.kv_groups * (facts.hidden // facts.heads)
    # bf16: both norms' inputs, inputs of QKV and MLP; queries, attention's output; keys and values; gate, up, product
    outside, inside = 4 * facts.hidden, 2 * facts.hidden + 2 * kv + 3 * facts.ffn
    per_token = BF16 * (outside / (facts.tp if facts.sequence_parallel else 1) + inside / facts.tp)
    if facts.recompute != "full":
        return facts.microbatch_tokens * per_token * layers
    kept = BF16 * facts.hidden / (facts.tp if facts.sequence_parallel else 1)
    return facts.microbatch_tokens * (kept * layers + per_token)


def _rollout(facts: RunFacts, training: tuple[Part, ...]) -> tuple[Part, ...]:
    stays = {"weights": not facts.offload_param, "gradients": not facts.offload_grad}
    stays["optimizer"] = not facts.offload_optimizer
    resident = sum(part.bytes for part in training if stays.get(part.name, False))
    weights = BF16 * model_parameters(facts) / facts.rollout_tp
    batch = facts.max_batched_tokens * BF16 * (4 * facts.hidden + 3 * facts.ffn / facts.rollout_tp)
    sampling = facts.max_sequences * facts.vocab * 2 * FP32
    share, outside = facts.memory_utilization * facts.memory_gib * GIB, facts.reserved_gib * GIB
    return (
        Part("training state not offloaded", resident, "generate_config.offload_train_*"),
        Part("rollout weights", weights, "2 bytes x parameters / rollout TP"),
        Part(
            "rollout activations", batch + sampling, "max_num_batched_tokens, and max_num_seqs x vocabulary x 8 bytes"
        ),
        Part("outside of torch", outside, "hardware.reserved_gib, which vLLM-Ascend takes off its share"),
        Part("KV cache", share - weights - batch - sampling - outside, "the rest of gpu_memory_utilization x memory"),
    )
