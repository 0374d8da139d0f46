"""Estimated memory of a run on verl with FSDP: training and rollout on the fullest device, host memory and checkpoints.

Nothing was measured on a GPU or an NPU; the formulas follow verl 0.9.1's engine (``workers/engine/fsdp``).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from coca_mindspeed.config.plan import Part, Phase
from coca_mindspeed.errors import Problem
from coca_mindspeed.utils.json_files import read_object
from coca_mindspeed.utils.process import GIB
from coca_mindspeed.verl.requirements import ACTOR, ROLLOUT, TOKENS, VerlRun

_BF16, _FP32 = 2, 4
_OUTSIDE = 1.5 * GIB  # context of the device and communication buffers
_DENSE = ("llama", "mistral", "qwen2", "qwen3")
_SIZES = {
    "hidden_size",
    "intermediate_size",
    "max_position_embeddings",
    "num_attention_heads",
    "num_hidden_layers",
    "vocab_size",
}
_ENGINE = f"{ACTOR}.fsdp_config"
_MEMORY = f"{ROLLOUT}.gpu_memory_utilization"


@dataclass(frozen=True)
class Shapes:
    """Sizes of a dense transformer with grouped queries and a gated MLP."""

    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head: int
    vocab: int
    tied: bool
    context: int

    @property
    def layer_parameters(self) -> int:
        queries, keys = self.heads * self.head, 2 * self.kv_heads * self.head
        return self.hidden * (2 * queries + keys + 3 * self.ffn + 2)

    @property
    def parameters(self) -> int:
        return self.layers * self.layer_parameters + self.vocab * self.hidden * (1 if self.tied else 2)


def read_shapes(model: Path) -> Shapes | None:
    """The sizes in a model's ``config.json``; None if it is not here, or of a kind whose memory is not estimated."""
    if not (file := model / "config.json").is_file():
        return None
    config = read_object(file)
    if config.get("model_type") not in _DENSE or not config.keys() >= _SIZES:
        return None
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    return Shapes(
        layers=config["num_hidden_layers"],
        hidden=hidden,
        ffn=config["intermediate_size"],
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head=config.get("head_dim") or hidden // heads,
        vocab=config["vocab_size"],
        tied=bool(config.get("tie_word_embeddings", False)),
        context=config["max_position_embeddings"],
    )


def estimated(run: VerlRun) -> bool:
    """Whether there is an estimate: of full training with FSDP."""
    lora = run.value("actor_rollout_ref.model.lora_rank") or run.value("actor_rollout_ref.model.lora_adapter_path")
    return not run.megatron and not lora


def shards(run: VerlRun) -> int:
    """Devices that share the weights."""
    size = run.value(f"{_ENGINE}.fsdp_size") or -1
    return run.layout.devices if size < 1 else min(size, run.layout.devices)


def weight_bytes(run: VerlRun) -> int:
    return _BF16 if str(run.value(f"{_ENGINE}.model_dtype")) in ("bf16", "bfloat16") else _FP32


def _tokens(run: VerlRun) -> int:
    """Most tokens of a microbatch on a device."""
    if run.dynamic:
        return int(run.value(TOKENS))
    return int(run.value(f"{ACTOR}.ppo_micro_batch_size_per_gpu")) * run.layout.longest // run.sequence_devices


def phases(run: VerlRun, shapes: Shapes, *, npu: bool) -> tuple[Phase, Phase]:
    """The two phases of a step, which take turns on a device; microbatches are full of the longest sequences."""
    share, size, tokens = shapes.parameters / shards(run), weight_bytes(run), _tokens(run)
    cpu = bool(run.value(f"{_ENGINE}.offload_policy"))  # FSDP2 keeps weights, gradients and moments on the host
    states = {"weights": size * share, "gradients": size * share, "optimizer": 2 * size * share}
    gathered = _BF16 * (shapes.vocab * shapes.hidden + 2 * shapes.layer_parameters)
    width = shapes.heads * shapes.head + shapes.kv_heads * shapes.head
    layer = tokens * _BF16 * (4 * shapes.hidden + 2 * width + 3 * shapes.ffn)
    checkpointing = run.value("actor_rollout_ref.model.enable_gradient_checkpointing")
    kept = shapes.layers * (tokens * _BF16 * shapes.hidden if checkpointing else layer)
    # flash_attn's cross entropy overwrites the logits by their gradient; NPUs keep a softmax and a gradient too.
    logits = tokens * shapes.vocab * _BF16 * (3 if npu else 1)
    limit = run.settings.device_memory_gib
    training = (
        *(Part(name, 0 if cpu else part, f"in {shards(run)} shards") for name, part in states.items()),
        Part("gathered weights", gathered, "embedding and two layers in bfloat16"),
        Part("activations", kept, f"{tokens} tokens x {shapes.layers} layers"),
        Part("logits or a layer", max(logits, layer), f"{tokens} tokens, the larger of both"),
        Part("outside of torch", _OUTSIDE, "context and communication, estimated"),
    )
    away = {"weights": run.value(f"{_ENGINE}.param_offload"), "optimizer": run.value(f"{_ENGINE}.optimizer_offload")}
    stays = 0 if run.separate or cpu else sum(states[name] for name, offloaded in away.items() if not offloaded)
    engine = float(run.value(_MEMORY)) * limit * GIB
    tensor = int(run.value(f"{ROLLOUT}.tensor_model_parallel_size"))
    weights = _BF16 * shapes.parameters / tensor
    batch = int(run.value(f"{ROLLOUT}.max_num_batched_tokens") or 8192)
    working = batch * _BF16 * (4 * shapes.hidden + 3 * shapes.ffn / tensor) + batch * shapes.vocab * _FP32 / tensor / 8
    bucket = int(run.value(f"{ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes") or 0) * 2**20
    rollout = (
        Part("training state not offloaded", stays, f"{_ENGINE}.param_offload, optimizer_offload"),
        Part("rollout weights", weights, "2 bytes x parameters / rollout TP"),
        Part("rollout activations", working, "max_num_batched_tokens, estimated"),
        Part("KV cache", engine - weights - working, f"the rest of {_MEMORY}"),
        Part("weight bucket", bucket, "update_weights_bucket_megabytes"),
        Part("outside of torch", _OUTSIDE, "context and communication, estimated"),
    )
    return Phase("training", training, limit), Phase("rollout", rollout, limit)


def cached_sequences(run: VerlRun, shapes: Shapes, rollout: Phase) -> float:
    """Longest sequences that the KV cache of a rollout engine holds."""
    tensor = int(run.value(f"{ROLLOUT}.tensor_model_parallel_size"))
    token = 2 * _BF16 * shapes.layers * max(1, shapes.kv_heads / tensor) * shapes.head
    return max(0.0, rollout.bytes_of("KV cache")) / (token * run.layout.longest)


def host_gib(run: VerlRun, shapes: Shapes) -> float:
    """GiB of a node that offloaded state fills, without Ray's object store and the data."""
    cpu = run.value(f"{_ENGINE}.offload_policy")
    parts = 2 if cpu else bool(run.value(f"{_ENGINE}.param_offload"))  # the policy keeps gradients there too
    parts += 2 * bool(cpu or run.value(f"{_ENGINE}.optimizer_offload"))
    per_device = parts * weight_bytes(run) * shapes.parameters / shards(run)
    return float(per_device * int(run.value("trainer.n_gpus_per_node")) / GIB)


def checkpoint_gib(run: VerlRun, shapes: Shapes) -> float:
    """One checkpoint of FSDP: weights and both moments."""
    return 3 * weight_bytes(run) * shapes.parameters / GIB


def memory_warnings(run: VerlRun, shapes: Shapes | None, memory: Sequence[Phase]) -> Iterator[Problem]:
    """A warning for each phase that does not fit, by estimate, for microbatches of the longest sequences."""
    if shapes is None:
        return
    training, rollout = memory
    key = TOKENS if run.dynamic else f"{ACTOR}.ppo_micro_batch_size_per_gpu"
    limit = f"GiB of a device's {training.limit_gib:g} (coca.device_memory_gib), by estimate"
    if training.gib > training.limit_gib:
        reason = f"training needs {training.gib:.1f} {limit}"
        yield Problem("memory-training", key, run.value(key), reason, "lower it, or use more devices")
    if rollout.gib > rollout.limit_gib:
        fix = f"lower it, or set {_ENGINE}.param_offload=true and optimizer_offload=true"
        yield Problem("memory-rollout", _MEMORY, run.value(_MEMORY), f"rollout needs {rollout.gib:.1f} {limit}", fix)
    if (held := cached_sequences(run, shapes, rollout)) < 1:
        reason = f"the KV cache holds {held:.2f} sequences of {run.layout.longest} tokens, by estimate"
        yield Problem("memory-kv-cache", _MEMORY, run.value(_MEMORY), reason, "raise it, or the rollout's TP")
    if run.layout.longest > shapes.context:
        reason = f"must fit with its prompt into the model's context of {shapes.context}: verl cuts the response"
        yield Problem("context", "data.max_response_length", run.value("data.max_response_length"), reason)
