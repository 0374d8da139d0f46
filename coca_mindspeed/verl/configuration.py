"""A verl configuration as verl would compose it, where verl is installed; else what our own files say of it.

What neither says has verl's default, which :mod:`.checks` knows for the keys that matter.
"""

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from coca_mindspeed.config.checks import Problem
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
from coca_mindspeed.errors import ConfigError, UsageError
from coca_mindspeed.utils.text_formats import YamlError, read_yaml
from coca_mindspeed.verl.checks import value_of
from coca_mindspeed.verl.settings import VerlSettings

#: The file that verl's own configuration starts from, by its name in ``defaults``.
VERLS_OWN = "ppo_trainer"
_BASE = "coca_base"


def ready_made_verl_runs() -> list[str]:
    """Names of the configurations in ``configs/verl``."""
    return sorted(path.stem for path in (config_directory() / "verl").glob("*.yaml") if path.stem != _BASE)


def find_verl_run(name: str) -> Path | None:
    """The YAML file of a run on verl: a ready-made one by its name, or a path; None if it is no run on verl."""
    if name in ready_made_verl_runs():
        return config_directory() / "verl" / f"{name}.yaml"
    path = Path(name).expanduser()
    if path.suffix != ".yaml" or not path.is_file():
        return None
    return path if VERLS_OWN in _all_defaults(path) else None


def verl_configuration(file: Path, overrides: Sequence[str]) -> dict[str, Any]:
    """Compose a run, as plain containers, interpolations resolved.

    Args:
        file: of :func:`find_verl_run`.
        overrides: Hydra's ``key=value``, ``+key=value`` and so on, as verl takes them.

    Raises:
        ConfigError: it cannot be composed.
    """
    verl = _verls_directory()
    try:
        values = _by_verl(verl, file, overrides) if verl is not None else _by_our_files(file, overrides)
    except (HydraException, OmegaConfBaseException, yaml.YAMLError) as error:
        if overrides:
            raise UsageError(f"{file} with {' '.join(overrides)}: cannot be composed: {error}") from error
        raise ConfigError(f"{file}: cannot be composed: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{file}: expected a mapping of keys, found {type(values).__name__}")
    return {str(key): value for key, value in values.items()}


def _verls_directory() -> Path | None:
    spec = importlib.util.find_spec("verl")
    folders = [] if spec is None else list(spec.submodule_search_locations or ())
    return next((Path(folder) / "trainer" / "config" for folder in folders), None)


def _by_verl(verl: Path, file: Path, overrides: Sequence[str]) -> Any:
    search = f"hydra.searchpath=[file://{verl}]"
    with initialize_config_dir(str(file.resolve().parent), version_base=None):
        return OmegaConf.to_container(compose(file.stem, overrides=[search, *overrides]), resolve=True)


def _by_our_files(file: Path, overrides: Sequence[str]) -> Any:
    """Our files in their order, without verl's."""
    merged = OmegaConf.create()
    for path in _in_order(file):
        content: Any = OmegaConf.load(path)
        if OmegaConf.is_dict(content):
            content.pop("defaults", None)
        merged.merge_with(content)
    for override in OverridesParser.create().parse_overrides(list(overrides)):
        if override.is_delete():
            raise UsageError(f"{override.input_line}: a key can be taken away only where verl is installed")
        OmegaConf.update(merged, override.key_or_group, override.value(), force_add=True)
    return OmegaConf.to_container(merged, resolve=True)


def _in_order(file: Path) -> list[Path]:
    """The files that a file's ``defaults`` name beside it, and itself where they say ``_self_`` (else at the end)."""
    found, own = [], False
    for name in _defaults(file):
        if name == "_self_":
            found.append(file)
            own = True
        elif (named := file.parent / f"{name}.yaml").is_file():
            found += _in_order(named)
    return found if own else [*found, file]


def _all_defaults(file: Path) -> set[str]:
    found: set[str] = set()
    for name in _defaults(file):
        found.add(name)
        if name != "_self_" and (named := file.parent / f"{name}.yaml").is_file():
            found |= _all_defaults(named)
    return found


def _defaults(file: Path) -> list[str]:
    try:
        content = read_yaml(file)
    except (OSError, YamlError) as error:
        raise ConfigError(f"{file}: cannot be read: {error}") from error
    defaults = content.get("defaults", []) if isinstance(content, dict) else []
    return [name for name in defaults if isinstance(name, str)] if isinstance(defaults, list) else []


_ACTOR, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"


@dataclass(frozen=True, slots=True)
class RunLayout:
    """A run's plan.

    Attributes:
        rows: label and value, for people.
        training: parts of a device's memory during the update; empty where the model's shape is not known.
        rollout: parts while responses are sampled, likewise.
        limit_gib: of a device.
        problems: of memory.
    """

    rows: tuple[tuple[str, str], ...]
    training: tuple[Part, ...]
    rollout: tuple[Part, ...]
    limit_gib: float
    problems: tuple[Problem, ...]


def run_layout(config: Mapping[str, Any], settings: VerlSettings) -> RunLayout:
    """Lay a run out that :func:`~coca_mindspeed.verl.checks.verl_problems` has nothing against."""
    numbers = _Numbers.of(config)
    shape = None if settings.device.model is None else model_shape(settings.device.model)
    training = () if shape is None else _training(numbers, shape)
    rollout = () if shape is None else _rollout(numbers, shape, settings.device.memory_gib)
    limit = settings.device.memory_gib
    problems = []
    if (needed := sum(part.gib for part in training)) > limit:
        reason = f"an update needs about {needed:.0f} GiB of each device"
        problems.append(Problem("memory-update", "coca.device.memory_gib", limit, reason))
    if shape is not None and rollout[-1].bytes <= kv_bytes_per_token(shape, numbers.tensor) * numbers.longest:
        reason = f"leaves no space for one sequence of {numbers.longest} tokens beside the weights"
        problems.append(Problem("memory-kv-cache", f"{_ROLLOUT}.gpu_memory_utilization", numbers.share, reason))
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
