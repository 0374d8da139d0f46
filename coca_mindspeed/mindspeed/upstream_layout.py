"""A YAML file in MindSpeed-RL's own layout (``megatron_training:``, ``rl_config:``, ... at the top) as a run of ours.

Values move to the keys of ours that set them in ready-made runs, so that overrides, plan and launch scripts are the
same for both layouts. Other keys stay as they are.
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

from coca_mindspeed.config.compose import ComposedConfig, compose_run, config_directory, hydra_override
from coca_mindspeed.config.schema import OptimizerConfig
from coca_mindspeed.errors import ConfigError, show_value
from coca_mindspeed.mindspeed.checks import needs_reference, other_npus
from coca_mindspeed.mindspeed.stages.dataset import RECORD
from coca_mindspeed.mindspeed.start.driver import compose_config
from coca_mindspeed.mindspeed.upstream_keys import GRPO_VALUES, ignored_keys, mapped_keys, our_keys, places, underscored
from coca_mindspeed.utils.text_formats import YamlError, read_yaml, value_of

_MARKS = ("megatron_training", "actor_config", "rl_config", "generate_config")
_SECTIONS = (*_MARKS, "ref_config", "reward_config", "profiler_config", "msprobe_config", "coca")
_SHAPE = {  # Megatron's defaults
    **dict.fromkeys(("untied_embeddings", "qkv_bias", "qk_layernorm"), False),
    "rope_theta": 10_000,
    "norm_eps": 1e-5,
}
# Keys that get their values when the run file is written, besides train_iters and lr_warmup_fraction.
_WRITTEN = ("actor_config.save", "rl_config.wandb_exp_name", "rl_config.wandb_save_dir")
_WRITTEN_OF_COCA = ("stage", "output_dir", "data_sha256")


def compose_any_layout(name: str, overrides: Sequence[str] = (), *, allow_missing: bool = False) -> ComposedConfig:
    """Compose a run of ours, or a YAML file in MindSpeed-RL's layout.

    Overrides of such a file may name MindSpeed-RL's keys (``actor_config.lr=1e-5``) or ours.

    Raises ConfigError as :func:`~coca_mindspeed.config.compose.compose_run` does.
    """
    file = Path(name).expanduser()
    if not _is_upstream_layout(file):
        return compose_run(name, overrides, allow_missing=allow_missing)
    theirs, ours = list[str](), list[str]()
    for override in overrides:
        key = override.lstrip("+~").removeprefix("mindspeed_rl.")
        prefix = override[: len(override) - len(override.lstrip("+~"))]
        (theirs if key.split(".")[0] in _SECTIONS else ours).append(prefix + key)
    run, notes = _convert(_compose(file, theirs), file.stem)
    # Typed keys of MindSpeed-RL are also set where they are, so that a contradiction to a key of ours is found.
    stay = [f"mindspeed_rl.{each.lstrip('+')}" for each in theirs if not each.lstrip("+").startswith(("~", "coca."))]
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
    return isinstance(content, Mapping) and any(section in content for section in _MARKS)


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
    return sections


def _convert(values: dict[str, Any], name: str) -> tuple[dict[str, Any], list[str]]:
    """A run of ours that gives MindSpeed-RL's keys the values of the file ``name``; and notes on the exceptions."""
    theirs = underscored({name: content for name, content in values.items() if name != "model"})
    theirs["model"] = _shapes(values.get("model", {}), theirs)
    ours: dict[str, Any] = {
        "model": {"compute_dtype": "bfloat16", "architecture": dict(_SHAPE)},
        "optimizer": {"betas": [*OptimizerConfig().betas]},
        "hardware": {**_machine(theirs, name), "platform": value_of(theirs, "coca.platform", "npu")},
    }
    ignored, replaced = _drop_ignored(theirs), list[str]()
    project = _pop(theirs, "rl_config.wandb_project")
    if value_of(theirs, "rl_config.use_wandb"):
        ours["logging"] = {"wandb": project or "coca"}
    for key, text in mapped_keys(ours["hardware"]["platform"]).items():
        found, (name, *_) = _pop(theirs, key), our_keys(text)
        _put(theirs, key, text)
        if found is None:
            continue
        if text == f"${{{name}}}":
            _put(ours, name, found)
        elif key == "megatron_training.seq_length":
            replaced.append(f"{key}={found} by the longest prompt and response together")
        elif name == "seed" and type(found) is int:
            ours["seed"] = found - 1
        elif key == "rl_config.mini_batch_size" and _divides(found, value_of(ours, "rollout.prompts")):
            _put(ours, "trainer.minibatches", ours["rollout"]["prompts"] // found)
        elif key != "rl_config.use_wandb":
            _put(theirs, key, found)  # no value of ours gives this one: it is refused as set twice
    architecture = ours["model"]["architecture"]
    architecture.setdefault("kv_groups", architecture.get("heads"))
    steps, warmup = (
        value_of(theirs, key) for key in ("megatron_training.train_iters", "actor_config.lr_warmup_fraction")
    )
    if type(steps) is int and type(warmup or 0) in (int, float):
        for key in ("megatron_training.train_iters", "actor_config.lr_warmup_fraction"):
            _pop(theirs, key)
        _put(ours, "trainer.steps", steps)
        ours["optimizer"]["warmup_steps"] = round((warmup or 0) * steps)
    replaced += [f"{key}={found} by --output" for key in _WRITTEN if (found := _pop(theirs, key)) is not None]
    for name in _WRITTEN_OF_COCA:
        _pop(theirs, f"coca.{name}")
    key, wanted = "megatron_training.dataset_additional_keys", [RECORD]
    if (found := _pop(theirs, key)) not in (None, wanted):
        replaced.append(f"{key}={found} by {wanted}")
    _put(theirs, key, wanted)
    notes = [f"{title}: {', '.join(keys)}" for title, keys in (("ignored", ignored), ("replaced", replaced)) if keys]
    defaults = ["base", {"override /model": "hf"}, {"override /data": "records"}, "_self_"]
    return {"defaults": defaults, **ours, "mindspeed_rl": theirs}, notes


def _divides(size: Any, number: Any) -> bool:
    return type(size) is int and type(number) is int and size > 0 and number % size == 0


def _shapes(shapes: Mapping[str, Any], theirs: dict[str, Any]) -> dict[str, Any]:
    """The shapes that sections name, the actor's as ``actor``, as ready-made runs name it."""
    actor = value_of(theirs, "actor_config.model", value_of(theirs, "megatron_training.model"))
    found = {"actor": shapes.get(actor) or {}}
    for section in ("megatron_training", "actor_config"):
        theirs.setdefault(section, {})["model"] = "actor"
    for section in ("ref_config", "reward_config"):
        if (name := value_of(theirs, f"{section}.model")) == actor and name is not None:
            theirs[section]["model"] = "actor"
        elif name in shapes:
            found[name] = shapes[name]
    return {name: underscored(shape) for name, shape in found.items()}


def _machine(theirs: dict[str, Any], name: str) -> dict[str, Any]:
    """The section ``hardware``: of an Atlas A2 or A3 as the file's name says, or as one node holds the NPUs."""
    actor: Any = value_of(theirs, "rl_config.actor_resource.num_npus")
    npus = actor + sum(other_npus(theirs).values()) if isinstance(actor, int) else None
    atlas = re.findall(r"(?<![^_\W])A[23](?![^_\W])", name.upper())
    kind = "910b" if atlas[-1:] == ["A2"] or (not atlas and (npus or 0) <= 8) else "910c"
    machine: dict[str, Any] = read_yaml(config_directory() / "hardware" / f"ascend_{kind}.yaml")["hardware"]
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


def _pop(values: dict[str, Any], key: str) -> Any:
    """Remove a key from all sections that it may stand in, and return the value that MindSpeed-RL would take."""
    found = {}
    for place in places(key, "actor"):
        section, _, name = place.rpartition(".")
        if isinstance(content := value_of(values, section), dict) and name in content:
            found[section] = content.pop(name)
    order = ("model.actor", "megatron_training", "actor_config")
    return next((found[section] for section in (*reversed(order), *found) if section in found), None)


def _put(values: Any, key: str, value: Any) -> None:
    *sections, name = key.split(".")
    for section in sections:
        values = values.setdefault(section, {})
    values[int(name) if isinstance(values, list) else name] = value
