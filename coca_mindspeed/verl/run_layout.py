"""What a run on verl will do, in numbers, before anything starts: batches, their way to the devices, memory.

Memory is an estimate from shapes, with FSDP sharding over all devices; none of it was measured.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from coca_mindspeed.config.compose import config_directory
from coca_mindspeed.config.model_size import (
    BF16,
    FP32,
    GIB,
    Part,
    kv_bytes_per_token,
    layer_parameters,
    model_parameters,
)
from coca_mindspeed.config.schema import ArchitectureConfig
from coca_mindspeed.errors import ConfigError
from coca_mindspeed.verl.required_keys import value_of
from coca_mindspeed.verl.settings import VerlSettings
from coca_mindspeed.yaml_text import read_yaml

_ACTOR, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"


@dataclass(frozen=True, slots=True)
class RunLayout:
    """A run's plan.

    Attributes:
        rows: label and value, for people.
        training: parts of a device's memory during the update; empty where the model's shape is not known.
        rollout: parts while responses are sampled, likewise.
        limit_gib: of a device.
        problems: what will not fit, one line each.
    """

    rows: tuple[tuple[str, str], ...]
    training: tuple[Part, ...]
    rollout: tuple[Part, ...]
    limit_gib: float
    problems: tuple[str, ...]


def run_layout(config: Mapping[str, Any], settings: VerlSettings) -> RunLayout:
    """Lay a run out that :func:`~coca_mindspeed.verl.required_keys.refusals` has nothing against."""
    numbers = _Numbers.of(config)
    shape = None if settings.device.model is None else model_shape(settings.device.model)
    training = () if shape is None else _training(numbers, shape)
    rollout = () if shape is None else _rollout(numbers, shape, settings.device.memory_gib)
    limit = settings.device.memory_gib
    problems = []
    if (needed := sum(part.gib for part in training)) > limit:
        problems.append(f"an update needs about {needed:.0f} GiB a device, coca.device.memory_gib is {limit:g}")
    if shape is not None and rollout[-1].bytes <= kv_bytes_per_token(shape, numbers.tensor) * numbers.longest:
        problems.append(
            f"{_ROLLOUT}.gpu_memory_utilization: beside the weights there is no room for one sequence of "
            f"{numbers.longest} tokens"
        )
    return RunLayout(_rows(numbers, shape, settings, rollout), training, rollout, limit, tuple(problems))


def model_shape(name: str) -> ArchitectureConfig:
    """The shape that ``configs/model/NAME.yaml`` says.

    Raises:
        ConfigError: there is no such file, or it says none.
    """
    path = config_directory() / "model" / f"{name}.yaml"
    content = read_yaml(path) if path.is_file() else {}
    model = content.get("model", content) if isinstance(content, dict) else {}
    if "architecture" not in model:
        known = sorted(file.stem for file in path.parent.glob("*.yaml") if "architecture" in file.read_text())
        raise ConfigError(f"coca.device.model: {name!r} has no shape in configs/model; known: {', '.join(known)}")
    return ArchitectureConfig.model_validate(model["architecture"])


@dataclass(frozen=True, slots=True)
class _Numbers:
    nodes: int
    devices: int
    sequence: int
    prompts: int
    group: int
    mini: int
    epochs: int
    longest: int
    new_tokens: int
    update_tokens: int | None
    microbatch: int | None
    tensor: int
    share: float
    steps: str

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> "_Numbers":
        nodes = value_of(config, "trainer.nnodes", 1)
        dynamic = value_of(config, f"{_ACTOR}.use_dynamic_bsz", False)
        new_tokens = value_of(config, "data.max_response_length", 512)
        steps = value_of(config, "trainer.total_training_steps", None)
        return cls(
            nodes=nodes,
            devices=nodes * value_of(config, "trainer.n_gpus_per_node", 8),
            sequence=value_of(config, f"{_ACTOR}.ulysses_sequence_parallel_size", 1),
            prompts=value_of(config, "data.train_batch_size", 1024),
            group=value_of(config, f"{_ROLLOUT}.n", 1),
            mini=value_of(config, f"{_ACTOR}.ppo_mini_batch_size", 256),
            epochs=value_of(config, f"{_ACTOR}.ppo_epochs", 1),
            longest=value_of(config, "data.max_prompt_length", 512) + new_tokens,
            new_tokens=new_tokens,
            update_tokens=value_of(config, f"{_ACTOR}.ppo_max_token_len_per_gpu", 16384) if dynamic else None,
            microbatch=None if dynamic else value_of(config, f"{_ACTOR}.ppo_micro_batch_size_per_gpu", None),
            tensor=value_of(config, f"{_ROLLOUT}.tensor_model_parallel_size", 2),
            share=value_of(config, f"{_ROLLOUT}.gpu_memory_utilization", 0.5),
            steps=f"{steps} steps" if steps else f"epochs: {value_of(config, 'trainer.total_epochs', 30)}",
        )

    @property
    def ranks(self) -> int:
        return self.devices // self.sequence

    @property
    def tokens(self) -> int:
        """Of the largest microbatch on a device."""
        return self.update_tokens or (self.microbatch or 1) * self.longest // self.sequence


def _rows(
    numbers: _Numbers, shape: ArchitectureConfig | None, settings: VerlSettings, rollout: tuple[Part, ...]
) -> tuple[tuple[str, str], ...]:
    responses = numbers.prompts * numbers.group
    stages = settings.method.training_method.stages
    rows = [
        ("method", f"{settings.method.name}, loss aggregation {settings.method.loss_aggregation}"),
        ("devices", f"{numbers.devices} on {numbers.nodes} node{'s' * (numbers.nodes > 1)}"),
        ("training", f"FSDP over {numbers.ranks} ranks, {responses // numbers.ranks} responses of a step on each"),
        ("rollout", f"{numbers.devices // numbers.tensor} engines of tensor parallel size {numbers.tensor}"),
        ("a step", f"{numbers.prompts} questions x {numbers.group} responses = {responses}"),
        ("updates a step", f"{numbers.prompts // numbers.mini * numbers.epochs} of {numbers.mini} questions"),
        ("microbatches", f"up to {numbers.tokens} tokens" if numbers.update_tokens else f"of {numbers.microbatch}"),
        ("tokens", f"{numbers.longest} a sequence at most; {responses * numbers.new_tokens:,} new ones a step"),
        ("length", numbers.steps + (f", shared by {' and '.join(stages)}" if len(stages) > 1 else "")),
    ]
    if shape is not None:
        rows.insert(2, ("model", f"{model_parameters(shape) / 1e9:.2f} billion parameters, {shape.layers} layers"))
        held = rollout[-1].bytes / (kv_bytes_per_token(shape, numbers.tensor) * numbers.longest)
        rows.append(("KV cache", f"holds about {max(0.0, held):.0f} of the longest sequences an engine and device"))
    return tuple(rows)


def _training(numbers: _Numbers, shape: ArchitectureConfig) -> tuple[Part, ...]:
    parameters = model_parameters(shape)
    gathered = max(layer_parameters(shape), shape.vocab * shape.hidden)
    kept = BF16 * numbers.tokens * (shape.hidden * shape.layers + 4 * shape.hidden + 3 * shape.ffn)
    return (
        Part("training state", 4 * FP32 * parameters / numbers.devices, "16 bytes x parameters / devices"),
        Part("gathered weights", 2 * BF16 * gathered, "the largest layer or embedding, and the next one's"),
        Part("activations", kept, f"{numbers.tokens} tokens, recomputed layer by layer"),
        Part("logits", numbers.tokens * shape.vocab * (2 * BF16 + 2 * FP32), "12 bytes x tokens x vocabulary"),
    )


def _rollout(numbers: _Numbers, shape: ArchitectureConfig, memory_gib: float) -> tuple[Part, ...]:
    weights = BF16 * model_parameters(shape) / numbers.tensor
    share = numbers.share * memory_gib * GIB
    return (
        Part("rollout weights", weights, "2 bytes x parameters / tensor parallel size"),
        Part("KV cache", share - weights, "the rest of gpu_memory_utilization x memory"),
    )
