"""Compose a verl configuration, refuse keys that verl does not know, and plan the layout and memory of a run.

Where verl is not installed, only our own files are composed; :mod:`.checks` knows verl's defaults of the keys that
matter, and ``upstream_keys.json`` the keys of 0.9.1.
``python -m coca_mindspeed.verl.configuration DIRECTORY`` writes that file from verl's ``trainer/config``.
"""

import importlib.util
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from coca_mindspeed.config.checks import differing_shapes
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
from coca_mindspeed.errors import ConfigError, Problem, UsageError, did_you_mean
from coca_mindspeed.utils.text_formats import YamlError, read_yaml, value_of
from coca_mindspeed.verl.checks import ACTOR, MEGATRON, MINI_BATCH, ROLLOUT, TOKENS, VerlRun
from coca_mindspeed.verl.settings import NAME, VerlSettings

#: The file that verl's own configuration starts from, by its name in ``defaults``.
VERLS_OWN = "ppo_trainer"
_BASE = "coca_base"
MODEL = "actor_rollout_ref.model.path"
_MICROBATCH = f"{ACTOR}.ppo_micro_batch_size_per_gpu"
_TENSOR, _PIPELINE = (f"{MEGATRON}.{kind}_model_parallel_size" for kind in ("tensor", "pipeline"))


def ready_made_verl_runs() -> list[str]:
    """Names of the configurations in ``configs/verl``."""
    return sorted(path.stem for path in (config_directory() / "verl").glob("*.yaml") if path.stem != _BASE)


def find_verl_run(name: str) -> Path | None:
    """The YAML file of a run on verl, by the name of a ready-made one or by its path; None if it is no run on verl."""
    if name in ready_made_verl_runs():
        return config_directory() / "verl" / f"{name}.yaml"
    path = Path(name).expanduser()
    if path.suffix != ".yaml" or not path.is_file():
        return None
    return path if any(VERLS_OWN in _defaults(file) for file in _in_order(path)) else None


def verl_configuration(file: Path, overrides: Sequence[str]) -> dict[str, Any]:
    """Compose a run with Hydra's overrides into plain containers, interpolations resolved.

    Raises ConfigError if it cannot be composed; UsageError if there are overrides.
    """
    verl = verls_directory()
    try:
        values = _by_verl(verl, file, overrides) if verl is not None else _by_our_files(file, overrides)
    except (HydraException, OmegaConfBaseException, yaml.YAMLError) as error:
        if overrides:
            raise UsageError(f"{file} with {' '.join(overrides)}: cannot be composed: {error}") from error
        raise ConfigError(f"{file}: cannot be composed: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{file}: expected a mapping of keys, found {type(values).__name__}")
    return {str(key): value for key, value in values.items()}


def verls_directory() -> Path | None:
    """``trainer/config`` of the installed verl; None if there is none."""
    spec = importlib.util.find_spec("verl")
    folders = [] if spec is None else list(spec.submodule_search_locations or ())
    return Path(folders[0]) / "trainer" / "config" if folders else None


def _by_verl(verl: Path, file: Path, overrides: Sequence[str]) -> Any:
    search = f"hydra.searchpath=[file://{verl}]"
    with initialize_config_dir(str(file.resolve().parent), version_base=None):
        return OmegaConf.to_container(compose(file.stem, overrides=[search, *overrides]), resolve=True)


def _by_our_files(file: Path, overrides: Sequence[str]) -> Any:
    merged = OmegaConf.create()
    for path in _in_order(file):
        content: Any = OmegaConf.load(path)
        if OmegaConf.is_dict(content):
            content.pop("defaults", None)
        merged.merge_with(content)
    for override in OverridesParser.create().parse_overrides(list(overrides)):
        if override.is_delete():
            raise UsageError(f"{override.input_line}: a key can be deleted only where verl is installed")
        OmegaConf.update(merged, override.key_or_group, override.value(), force_add=True)
    return OmegaConf.to_container(merged, resolve=True)


def _in_order(file: Path) -> list[Path]:
    """The files in the order of ``defaults``, those of the named files included; ``_self_`` is last by default."""
    names = _defaults(file)
    found: list[Path] = []
    for name in names if "_self_" in names else [*names, "_self_"]:
        if name == "_self_":
            found.append(file)
        elif (named := file.parent / f"{name}.yaml").is_file():
            found += _in_order(named)
    return found


def _defaults(file: Path) -> list[str]:
    try:
        content = read_yaml(file)
    except (OSError, YamlError) as error:
        raise ConfigError(f"{file}: cannot be read: {error}") from error
    defaults = content.get("defaults", []) if isinstance(content, dict) else []
    return [name for name in defaults if isinstance(name, str)] if isinstance(defaults, list) else []


@dataclass(frozen=True, slots=True)
class RunLayout:
    """A run's plan: labels and values, and a device's memory.

    ``training`` and ``rollout`` are the memory during the update and the rollout, empty where the model's shape is not
    known; ``problems`` are of memory.
    """

    rows: tuple[tuple[str, str], ...]
    training: tuple[Part, ...]
    rollout: tuple[Part, ...]
    limit_gib: float
    problems: tuple[Problem, ...]


def run_layout(config: Mapping[str, Any], settings: VerlSettings) -> RunLayout:
    """Plan a run in which :func:`~coca_mindspeed.verl.checks.verl_problems` finds no problem."""
    run, share_key = VerlRun(config, settings), f"{ROLLOUT}.gpu_memory_utilization"
    shape = None if settings.device.model is None else model_shape(settings.device.model)
    limit, share = settings.device.memory_gib, run.value(share_key)
    tensor = run.value(f"{ROLLOUT}.tensor_model_parallel_size")
    rows = _rows(run, tensor)
    if shape is None:
        return RunLayout(tuple(rows), (), (), limit, ())
    training, weights = _training(run, shape), BF16 * model_parameters(shape) / tensor
    cache, sequence = share * limit * GIB - weights, kv_bytes_per_token(shape, tensor) * run.longest
    rollout = (
        Part("rollout weights", weights, "2 bytes x parameters / tensor parallel size"),
        Part("KV cache", cache, "the rest of gpu_memory_utilization x memory"),
    )
    rows.append(("model", f"{model_parameters(shape) / 1e9:.2f} billion parameters, {shape.layers} layers"))
    held = max(0.0, cache / sequence)
    rows.append(("KV cache", f"holds about {held:.0f} of the longest sequences an engine and device"))
    origin = f"configs/model/{settings.device.model}.yaml, which coca.device.model names"
    problems = differing_shapes(MODEL, value_of(config, MODEL), shape, origin)
    if (needed := sum(part.gib for part in training)) > limit:
        reason = f"an update needs about {needed:.0f} GiB of each device"
        problems.append(Problem("memory-update", "coca.device.memory_gib", limit, reason))
    if cache <= sequence:
        reason = f"the KV cache must hold one sequence of {run.longest} tokens"
        problems.append(Problem("memory-kv-cache", share_key, share, reason))
    return RunLayout(tuple(rows), training, rollout, limit, tuple(problems))


def model_shape(name: str) -> ArchitectureConfig:
    """The architecture in ``configs/model/NAME.yaml``; raises ``ConfigError`` if there is none."""
    path = config_directory() / "model" / f"{name}.yaml"
    content = read_yaml(path) if path.is_file() else {}
    model = content.get("model", content) if isinstance(content, dict) else {}
    if "architecture" not in model:
        known = sorted(file.stem for file in path.parent.glob("*.yaml") if "architecture" in file.read_text())
        raise ConfigError(f"coca.device.model: {name!r} has no shape in configs/model; known: {', '.join(known)}")
    return ArchitectureConfig.model_validate(model["architecture"])


def _microbatch_tokens(run: VerlRun) -> int:
    """Tokens of the largest microbatch on a device."""
    if run.dynamic:
        return int(run.value(TOKENS))
    shared = 1 if run.megatron else run.devices_of_a_rank[1]
    return (run.value(_MICROBATCH) or 1) * run.longest // shared


def _rows(run: VerlRun, tensor: int) -> list[tuple[str, str]]:
    value, devices, nodes = run.value, run.devices, run.value("trainer.nnodes")
    method = run.settings.method
    files = {key: value_of(run.config, key) for key in ("data.train_files", "data.val_files", MODEL)}
    absent = {key: " (MISSING)" * (not Path(str(path)).exists()) for key, path in files.items()}
    prompts, group, mini = value("data.train_batch_size"), value(f"{ROLLOUT}.n"), value(MINI_BATCH)
    responses, stages = prompts * group, method.training_method.stages
    engine = f"FSDP over {run.ranks} ranks"
    if run.megatron:
        engine = f"Megatron, TP {value(_TENSOR)}, PP {value(_PIPELINE)}, DP {run.ranks}"
    microbatches = f"up to {_microbatch_tokens(run)} tokens" if run.dynamic else f"of {value(_MICROBATCH)}"
    new_tokens = responses * value("data.max_response_length")
    steps = value("trainer.total_training_steps")
    length = f"{steps} steps" if steps else f"epochs: {value('trainer.total_epochs')}"
    return [
        ("method", f"{method.name}, loss aggregation {method.loss_aggregation}"),
        ("learning rate", f"{value_of(run.config, f'{ACTOR}.optim.lr', 1e-6):g}"),
        *((key, f"{path}{absent[key]}") for key, path in files.items() if isinstance(path, str)),
        ("devices", f"{devices} on {nodes} node{'s' * (nodes > 1)}"),
        ("training", f"{engine}, {responses // run.ranks} responses of a step on each rank"),
        ("rollout", f"{devices // tensor} engines of tensor parallel size {tensor}"),
        ("a step", f"{prompts} questions x {group} responses = {responses}"),
        ("updates a step", f"{prompts // mini * value(f'{ACTOR}.ppo_epochs')} of {mini} questions"),
        ("microbatches", microbatches),
        ("tokens", f"{run.longest} a sequence at most; {new_tokens:,} new ones a step"),
        ("length", length + (f", shared by {' and '.join(stages)}" if len(stages) > 1 else "")),
    ]


def _training(run: VerlRun, shape: ArchitectureConfig) -> tuple[Part, ...]:
    parameters, tokens = model_parameters(shape), _microbatch_tokens(run)
    gathered = max(layer_parameters(shape), shape.vocab * shape.hidden)
    kept = BF16 * tokens * (shape.hidden * shape.layers + 4 * shape.hidden + 3 * shape.ffn)
    logits = tokens * shape.vocab * (2 * BF16 + 2 * FP32)
    if run.megatron:
        tensor, pipeline = run.value(_TENSOR), run.value(_PIPELINE)
        held = (BF16 + FP32) * parameters / (tensor * pipeline)
        # A pipeline stage has 1/PP of the layers, and the activations of PP microbatches at once.
        return (
            Part("weights, gradients", held, "6 bytes x parameters / (TP x PP)"),
            Part("optimizer state", 3 * FP32 * parameters / run.devices, "12 bytes x parameters / devices"),
            Part("activations", kept / tensor, f"{tokens} tokens / TP, recomputed layer by layer"),
            Part("logits", logits / tensor, "12 bytes x tokens x vocabulary / TP"),
        )
    return (
        Part("training state", 4 * FP32 * parameters / run.devices, "16 bytes x parameters / devices"),
        Part("gathered weights", 2 * BF16 * gathered, "the largest layer or embedding, and the next one's"),
        Part("activations", kept, f"{tokens} tokens, recomputed layer by layer"),
        Part("logits", logits, "12 bytes x tokens x vocabulary"),
    )


_SHIPPED = Path(__file__).with_name("upstream_keys.json")
_ENGINES = ("dp", "megatron")


def known_keys(directory: Path | None) -> dict[str, Any]:
    """Nested names of the keys, with None for a value; of the verl whose ``trainer/config`` is given, or 0.9.1."""
    if directory is None:
        shipped: dict[str, Any] = json.loads(_SHIPPED.read_text(encoding="utf-8"))
        return shipped
    with initialize_config_dir(str(directory.resolve()), version_base=None):
        composed = [compose("ppo_trainer", overrides=[f"model_engine={engine}"]) for engine in _ENGINES]
    for config in composed:
        OmegaConf.set_struct(config, False)
    merged = OmegaConf.to_container(OmegaConf.merge(*composed))
    assert isinstance(merged, dict)
    return _names({str(name): value for name, value in merged.items()})


def unknown_keys(values: Mapping[str, Any], overrides: Sequence[str], known: Mapping[str, Any]) -> Iterator[Problem]:
    """A problem for each key that verl does not know, unless an override adds it with a plus."""
    added = [override.lstrip("+").partition("=")[0] for override in overrides if override.startswith("+")]
    yield from _unknown({key: value for key, value in values.items() if key != NAME}, known, "", added)


def _unknown(values: Mapping[str, Any], known: Mapping[str, Any], under: str, added: list[str]) -> Iterator[Problem]:
    for name, value in values.items():
        key = f"{under}{name}"
        if any(f"{key}.".startswith(f"{each}.") for each in added):
            continue
        if name in known:
            if isinstance(value, Mapping) and known[name]:
                yield from _unknown(value, known[name], f"{key}.", added)
        elif not any(each.startswith(f"{key}.") for each in added):
            expected = f"must be a key of verl's configuration{did_you_mean(str(name), known)}"
            yield Problem("unknown-key", key, value, expected, f"to add a key that verl reads: +{key}=...")


def _names(values: Mapping[str, Any]) -> dict[str, Any]:
    """Names below names; None for a value, an empty mapping and overrides of another configuration, which are free."""
    nested = {name for name, value in values.items() if isinstance(value, Mapping) and value}
    return {name: _names(values[name]) if name in nested and "override_" not in name else None for name in values}


if __name__ == "__main__":
    _SHIPPED.write_text(json.dumps(known_keys(Path(sys.argv[1])), indent=1, sort_keys=True) + "\n", encoding="utf-8")
