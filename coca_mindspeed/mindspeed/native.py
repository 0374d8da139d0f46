"""A run whose file is in MindSpeed-RL's layout (``megatron_training:``, ``rl_config:``, ...) with a section ``coca``.

Its values are MindSpeed-RL's as they are.  The schema of our runs is read from them, by the renames of the key table,
so that every check holds; messages name MindSpeed-RL's keys.
"""

import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError

from coca_mindspeed.config.compose import (
    GROUPS,
    ComposedConfig,
    compose_run,
    config_directory,
    is_mindspeed_rls,
    named_defaults,
)
from coca_mindspeed.config.schema import RunConfig
from coca_mindspeed.errors import ConfigError, Problem, UsageError, raise_problems, validation_problems
from coca_mindspeed.mindspeed.checks import coca_section, other_npus
from coca_mindspeed.mindspeed.keys import (
    RENAMES,
    NativeRun,
    actor_values,
    leaves,
    native_key,
    of_the_actor,
    put,
    underscored,
    written_as,
)
from coca_mindspeed.mindspeed.requirements import MindSpeedView
from coca_mindspeed.mindspeed.resolved_config import refuse_mixtures
from coca_mindspeed.mindspeed.upstream_keys import shipped_keys
from coca_mindspeed.utils.text_formats import YamlError, read_yaml, value_of

_OPTIONAL = {
    "model.megatron_path",
    "data.evaluate",
    "checkpoint.keep",
    "checkpoint.minutes",
    "hardware.memory_gib",
    "model.prompt_date",
}


def compose_cluster_run(name: str, overrides: Sequence[str] = ()) -> ComposedConfig:
    """Compose a run of ours, or one in MindSpeed-RL's layout, whose overrides have MindSpeed-RL's names.

    Raises as :func:`~coca_mindspeed.config.compose.compose_run`.
    """
    if not is_native(name):
        return compose_run(name, overrides, upstream=written_as)
    file = Path(name).expanduser()
    values = _compose(file, [_override(override) for override in overrides])
    return ComposedConfig(_read(values, file), name)


def is_native(name: str) -> bool:
    """Whether a run's name is the path of a YAML file in MindSpeed-RL's layout."""
    file = Path(name).expanduser()
    return file.suffix == ".yaml" and file.is_file() and is_mindspeed_rls(file)


def _override(override: str) -> str:
    """The override that Hydra gets; raises UsageError for a group or a key of our own runs."""
    typed, _, value = override.partition("=")
    key = typed.lstrip("+~")
    if key in GROUPS:
        sets = sorted({native_key(name) for name in _keys_of_group(key, value)})
        keys = f"; it would set {', '.join(sets)}" if sets else ""
        raise UsageError(f"override {override!r}: a file of MindSpeed-RL's has no groups of ours{keys}: set keys")
    if (theirs := native_key(key)) != key:
        raise UsageError(f"override {override!r}: a file of MindSpeed-RL's has its own keys; write {theirs}=...")
    return override if typed != key else f"++{override}"


def _keys_of_group(group: str, choice: str) -> list[str]:
    file = config_directory() / group / f"{choice}.yaml"
    content = read_yaml(file) if file.is_file() else {}
    return [key for key, _ in leaves(content) if not key.startswith("defaults")]


def _compose(file: Path, overrides: Sequence[str]) -> dict[str, Any]:
    """The sections of a file; its ``defaults`` may name MindSpeed-RL's own groups."""
    home = os.environ.get("MINDSPEED_RL_HOME")
    try:
        composed = compose_config(file, overrides, Path(home) if home else None)
        values: Any = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{file}: cannot be composed: {error}") from error
    except ConfigError as error:
        hint = "" if home else "\n    if its defaults name files of MindSpeed-RL, set MINDSPEED_RL_HOME"
        raise ConfigError(f"{error}{hint}") from error
    return {str(name): content for name, content in values.items()}


def compose_config(path: Path, overrides: Sequence[str] = (), mindspeed_rl_home: Path | None = None) -> DictConfig:
    """Compose a MindSpeed-RL configuration; its ``defaults`` may name MindSpeed-RL's own groups (``model``)."""
    if not path.is_file():
        raise ConfigError(f"{path}: no such configuration file")
    theirs = [] if mindspeed_rl_home is None else [mindspeed_rl_home / "configs"]
    search = [f"hydra.searchpath=[file://{directory}]" for directory in theirs]
    try:
        read_yaml(path)  # its errors name the line, Hydra's do not
        set(named_defaults(path.stem, [path.parent, *theirs]))
        with initialize_config_dir(str(path.resolve().parent), version_base=None), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="In .*missing `_self_`")  # MindSpeed-RL's files have none
            return compose(path.stem, overrides=[*search, *overrides])
    except (HydraException, OmegaConfBaseException, yaml.YAMLError, YamlError) as error:
        raise ConfigError(f"{path}: cannot be composed: {error}") from error
    except RecursionError as error:
        raise ConfigError(f"{path}: cannot be composed: its defaults name files that name each other") from error


def _read(values: dict[str, Any], file: Path) -> RunConfig:
    """The run of MindSpeed-RL's sections; raises ConfigError for values that it cannot have."""
    heading = f"{file}:"
    refuse_mixtures(values)
    raise_problems(shipped_keys().problems(values), heading)
    theirs = underscored({name: content for name, content in values.items() if name != "coca"})
    settings = coca_section(values, output_dir="runs", stage=0)
    stated = settings.model_dump(mode="json")
    coca = {**(values.get("coca") or {}), "method": stated["method"]}
    view, actor = MindSpeedView(theirs), actor_values(theirs)
    ours: dict[str, Any] = {"data": {"name": "records"}, "mindspeed_rl": {**theirs, "coca": coca}}
    problems = []
    for key, name in RENAMES.items():
        section, _, last = key.partition(".")
        value = value_of(stated, last) if section == "coca" else view.value(of_the_actor(key))
        if value is not None:
            put(ours, name, value)
        elif name not in _OPTIONAL and "rope_scaling" not in name:
            problems.append(Problem("missing-key", of_the_actor(key), None, "must be set: MindSpeed-RL has no default"))
    raise_problems(problems, heading)
    npus, nodes = view.value("rl_config.actor_resource.num_npus"), settings.nodes
    total = sum([npus, *other_npus(theirs).values()]) if isinstance(npus, int) else nodes
    steps, minibatch = actor.get("train_iters"), view.value("rl_config.mini_batch_size")
    prompts = ours["rollout"]["prompts"]
    whole = isinstance(minibatch, int) and minibatch > 0 and prompts % minibatch == 0
    for name, value in {
        "hardware.nodes": nodes,
        "hardware.npus_per_node": max(1, total // nodes),
        "model.compute_dtype": "bfloat16" if actor.get("bf16") else "float32",
        "optimizer.warmup_steps": round((actor.get("lr_warmup_fraction") or 0) * (steps or 0)),
        "trainer.minibatches": prompts // minibatch if whole else 1,
        "trainer.steps": steps,
    }.items():
        put(ours, name, value)
    betas = ours["optimizer"]["betas"]
    ours["optimizer"]["betas"] = [betas["0"], betas["1"]]
    smaller = read_yaml(config_directory() / "hardware" / "ascend_910b.yaml")  # its NPUs have the least memory
    ours["hardware"].setdefault("memory_gib", smaller["hardware"]["memory_gib"])
    if ours["model"]["architecture"].get("rope_scaling", {}).get("rope_type") is None:
        ours["model"]["architecture"].pop("rope_scaling", None)
    try:
        return NativeRun.model_validate(ours)
    except ValidationError as error:
        problems = validation_problems(error)
        raise_problems([problem._replace(key=native_key(problem.key)) for problem in problems], heading)
        raise
