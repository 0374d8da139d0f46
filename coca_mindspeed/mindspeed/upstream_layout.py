"""A YAML file in MindSpeed-RL's own layout (``megatron_training:``, ``rl_config:``, ... at the top) as a run of ours.

Values move to the keys of ours that set them, by the inverse of the key table; free keys stay as they are.  A value
without an inverse stays too, and is refused as set twice.
"""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml
from omegaconf import OmegaConf

from coca_mindspeed.config.compose import (
    ComposedConfig,
    compose_run,
    config_directory,
    hydra_override,
    named_defaults,
    ready_made_runs,
)
from coca_mindspeed.config.schema import OptimizerConfig
from coca_mindspeed.errors import ConfigError, UsageError, show_value
from coca_mindspeed.mindspeed.checks import needs_reference, other_npus
from coca_mindspeed.mindspeed.keys import (
    TABLE,
    UPSTREAM_SECTIONS,
    WRITTEN,
    places,
    put,
    table_of,
    underscored,
    written_as,
)
from coca_mindspeed.mindspeed.stages.dataset import RECORD
from coca_mindspeed.mindspeed.start.driver import compose_config
from coca_mindspeed.mindspeed.upstream_keys import GRPO_VALUES, ignored_keys
from coca_mindspeed.utils.text_formats import YamlError, read_yaml, value_of

_MARKS = ("megatron_training", "actor_config", "rl_config", "generate_config")
_SHAPE = {  # Megatron's defaults
    **dict.fromkeys(("untied_embeddings", "qkv_bias", "qk_layernorm"), False),
    "rope_theta": 10_000,
    "norm_eps": 1e-5,
}
_MACHINES = ("ascend_910b", "ascend_910c")


def compose_any_layout(name: str, overrides: Sequence[str] = (), *, allow_missing: bool = False) -> ComposedConfig:
    """Compose a run of ours, or a YAML file in MindSpeed-RL's layout.

    Overrides of such a file may name MindSpeed-RL's keys (``actor_config.lr=1e-5``) or ours, and ``hardware=`` chooses
    its machine.

    Raises ConfigError as :func:`~coca_mindspeed.config.compose.compose_run` does.
    """
    file = Path(name).expanduser()
    if not _is_upstream_layout(file):
        return compose_run(name, overrides, allow_missing=allow_missing, upstream=written_as)
    theirs, ours, machine = list[str](), list[str](), None
    for override in overrides:
        key = override.lstrip("+~").removeprefix("mindspeed_rl.")
        prefix = override[: len(override) - len(override.lstrip("+~"))]
        if key.startswith("hardware="):
            machine = key.partition("=")[2]
        else:
            (theirs if key.split(".")[0] in UPSTREAM_SECTIONS else ours).append(prefix + key)
    if machine not in (*_MACHINES, None):
        raise UsageError(
            f"override 'hardware={machine}': expected {' or '.join(_MACHINES)}; it chooses the machine alone, because "
            f"{file} sets MindSpeed-RL's keys itself; coca.platform=host runs it without an NPU (docs/port.md)"
        )
    run, notes = _convert(_compose(file, theirs), machine or _machine_of_name(file.stem))
    # Typed keys of MindSpeed-RL are also set where they are, so that a contradiction to a key of ours is found.
    stay = [f"mindspeed_rl.{each.lstrip('+')}" for each in theirs if not each.startswith("~")]
    with TemporaryDirectory() as directory:
        converted = Path(directory) / file.name
        converted.write_text(yaml.safe_dump(run, sort_keys=False), encoding="utf-8")
        try:
            composed = compose_run(str(converted), [*ours, *stay], allow_missing=allow_missing)
        except ConfigError as error:
            raise type(error)(str(error).replace(str(converted), str(file)), error.problems) from error
    return replace(composed, name=name, notes=tuple(notes))


def _is_upstream_layout(file: Path) -> bool:
    if file.suffix != ".yaml" or not file.is_file():
        return False
    try:
        content = read_yaml(file)
    except (OSError, YamlError):
        return False  # compose_run reports it
    if not isinstance(content, Mapping) or not any(section in content for section in _MARKS):
        return False
    # A file that stands on one of ours holds them in the wrong place.
    return not {"base", *ready_made_runs()}.intersection(named_defaults(file.stem, [file.parent]))


def _compose(file: Path, overrides: Sequence[str]) -> dict[str, Any]:
    """The sections of a file in MindSpeed-RL's layout; its ``defaults`` may name MindSpeed-RL's own groups."""
    home = os.environ.get("MINDSPEED_RL_HOME")
    try:
        config = compose_config(file, [hydra_override(each, ()) for each in overrides], Path(home) if home else None)
    except ConfigError as error:
        hint = "" if home else "\n    if its defaults name files of MindSpeed-RL, set MINDSPEED_RL_HOME"
        raise ConfigError(f"{error}{hint}") from error
    values = OmegaConf.to_container(config, resolve=True)
    assert isinstance(values, dict)
    sections = {str(name): content for name, content in values.items()}
    for name, content in sections.items():
        if not isinstance(content, Mapping):
            raise ConfigError(f"{file}: {name}: expected a mapping, found {show_value(content)}")
    return underscored(sections)


def _convert(theirs: dict[str, Any], machine: str | None) -> tuple[dict[str, Any], list[str]]:
    """A run of ours that gives MindSpeed-RL's keys the values of a file; and notes on the exceptions."""
    platform = value_of(theirs, "coca.platform", "npu")
    ours: dict[str, Any] = {
        "model": {"compute_dtype": "bfloat16", "architecture": dict(_SHAPE)},
        "optimizer": {"betas": dict(zip("01", OptimizerConfig().betas, strict=True))},
        "hardware": {**_machine(theirs, machine), "platform": platform},
    }
    replaced = list[str]()

    def replace_by(key: str, other: object) -> None:
        if (found := _pop(theirs, key)) not in (None, other):
            replaced.append(f"{key}={found} by {other}")

    ignored = _drop_ignored(theirs)
    project = _pop(theirs, "rl_config.wandb_project") or "coca"
    ours["logging"] = {"wandb": project if _pop(theirs, "rl_config.use_wandb") else None}
    replace_by("megatron_training.seq_length", "the longest prompt and response together")
    for key in ("actor_config.save", "rl_config.wandb_exp_name", "rl_config.wandb_save_dir"):
        replace_by(key, "--output")
    for key, entry in table_of(platform).items():
        *others, name = entry.ours
        if entry.inverse is None or (found := _pop(theirs, key)) is None:
            continue
        try:
            value = entry.inverse(*(value_of(ours, other) for other in others), found)
        except (TypeError, ValueError, ArithmeticError):
            value = None
        put(*((theirs, key, found) if value is None else (ours, name, value)))
    ours["optimizer"]["betas"] = [*ours["optimizer"]["betas"].values()]
    architecture = ours["model"]["architecture"]
    architecture.setdefault("kv_groups", architecture.get("heads"))
    for key in WRITTEN.keys() - TABLE.keys():
        _pop(theirs, key)
    replace_by("megatron_training.dataset_additional_keys", [RECORD])
    put(theirs, "megatron_training.dataset_additional_keys", [RECORD])
    notes = [f"{title}: {', '.join(keys)}" for title, keys in (("ignored", ignored), ("replaced", replaced)) if keys]
    defaults = ["base", {"override /model": "hf"}, {"override /data": "records"}, "_self_"]
    return {"defaults": defaults, **ours, "mindspeed_rl": theirs}, notes


def _machine_of_name(name: str) -> str | None:
    """The group of hardware that the name of a file says: Atlas A2 or A3."""
    atlas = re.findall(r"(?<![^_\W])A[23](?![^_\W])", name.upper())
    return {"A2": "ascend_910b", "A3": "ascend_910c"}[atlas[-1]] if atlas else None


def _machine(theirs: dict[str, Any], name: str | None) -> dict[str, Any]:
    """The section ``hardware`` of a group, or of that whose node holds the NPUs, for the number of NPUs."""
    actor: Any = value_of(theirs, "rl_config.actor_resource.num_npus")
    npus = actor + sum(other_npus(theirs).values()) if isinstance(actor, int) else None
    name = name or _MACHINES[(npus or 0) > 8]
    machine: dict[str, Any] = read_yaml(config_directory() / "hardware" / f"{name}.yaml")["hardware"]
    if npus is not None:
        machine["nodes"] = max(1, npus // machine["npus_per_node"])
        machine["npus_per_node"] = f"${{quotient:{npus},${{hardware.nodes}}}}"
    return machine


def _drop_ignored(theirs: dict[str, Any]) -> list[str]:
    """Remove the keys without effect and return them; keys that ask for another algorithm stay, and are refused."""
    dropped = []
    for problem in list(ignored_keys(theirs, reference=needs_reference(theirs))):
        name = problem.key.removeprefix("rl_config.")
        if problem.value in GRPO_VALUES.get(name, (problem.value,)):
            del theirs["rl_config"][name]
            dropped.append(f"{problem.key}={problem.value}")
    return dropped


def _pop(theirs: dict[str, Any], key: str) -> Any:
    """Remove a key from all sections that it may stand in, and return the value that MindSpeed-RL would take."""
    found = None
    for place in places(key, theirs):
        section, _, name = place.rpartition(".")
        if isinstance(content := value_of(theirs, section), dict):
            found = content.pop(name, found)
    return found
