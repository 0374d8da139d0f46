"""Compose a verl configuration, refuse keys that verl does not know, and describe a run.

Where verl is not installed, only our own files are composed; :mod:`.checks` knows verl's defaults of the keys that
matter, and ``upstream_keys.json`` the keys of 0.9.1.
``python -m coca_mindspeed.verl.configuration DIRECTORY`` writes that file from verl's ``trainer/config``.
"""

import importlib.util
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from coca_mindspeed.config.compose import config_directory
from coca_mindspeed.errors import ConfigError, Problem, UsageError, did_you_mean
from coca_mindspeed.utils.text_formats import YamlError, read_yaml, value_of
from coca_mindspeed.verl.checks import ACTOR, MEGATRON, MINI_BATCH, ROLLOUT, TOKENS, VerlRun
from coca_mindspeed.verl.settings import NAME, VerlSettings

#: The file that verl's own configuration starts from, by its name in ``defaults``.
VERLS_OWN = "ppo_trainer"
_BASE = "coca_base"
MODEL = "actor_rollout_ref.model.path"


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


def plan_rows(config: Mapping[str, Any], settings: VerlSettings) -> list[tuple[str, str]]:
    """Labels and values of a run in which :func:`~coca_mindspeed.verl.checks.verl_problems` finds no problem."""
    run = VerlRun(config, settings)
    value, devices, nodes = run.value, run.devices, run.value("trainer.nnodes")
    tensor = value(f"{ROLLOUT}.tensor_model_parallel_size")
    method = settings.method
    files = {key: value_of(config, key) for key in ("data.train_files", "data.val_files", MODEL)}
    absent = {key: " (MISSING)" * (not Path(str(path)).exists()) for key, path in files.items()}
    prompts, group, mini = value("data.train_batch_size"), value(f"{ROLLOUT}.n"), value(MINI_BATCH)
    responses, stages = prompts * group, method.training_method.stages
    engine = f"FSDP over {run.ranks} ranks"
    if run.megatron:
        tp, pp = (value(f"{MEGATRON}.{kind}_model_parallel_size") for kind in ("tensor", "pipeline"))
        engine = f"Megatron, TP {tp}, PP {pp}, DP {run.ranks}"
    microbatch = value_of(config, f"{ACTOR}.ppo_micro_batch_size_per_gpu")
    microbatches = f"up to {value(TOKENS)} tokens" if run.dynamic else f"of {microbatch}"
    new_tokens = responses * value("data.max_response_length")
    steps = value("trainer.total_training_steps")
    length = f"{steps} steps" if steps else f"epochs: {value('trainer.total_epochs')}"
    return [
        ("method", f"{method.name}, loss aggregation {method.loss_aggregation}"),
        ("learning rate", f"{value_of(run.config, f'{ACTOR}.optim.lr', 1e-6):g}"),
        *((key, f"{path}{absent[key]}") for key, path in files.items() if isinstance(path, str)),
        ("devices", f"{devices} on {nodes} node{'s' * (nodes > 1)}"),
        ("training", f"{engine}, {responses // run.ranks} responses of a step on each rank"),
        ("trainer", run.trainer),
        ("rollout", f"{run.rollout_devices // tensor} engines of tensor parallel size {tensor}"),
        ("a step", f"{prompts} questions x {group} responses = {responses}"),
        ("updates a step", f"{prompts // mini * value(f'{ACTOR}.ppo_epochs')} of {mini} questions"),
        ("microbatches", microbatches),
        ("tokens", f"{run.longest} a sequence at most; {new_tokens:,} new ones a step"),
        ("length", length + (f", shared by {' and '.join(stages)}" if len(stages) > 1 else "")),
    ]


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
