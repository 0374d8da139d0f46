"""Convert a YAML file in MindSpeed-RL's own layout (``megatron_training:``, ``rl_config:``, ... at the top) into ours.

Values move to the keys of ours that set them, by the inverse of the key table; free keys stay as they are, below
``mindspeed_rl``.
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from coca_mindspeed.config.compose import config_directory, is_mindspeed_rls, validate_config
from coca_mindspeed.config.requirements import required
from coca_mindspeed.config.schema import OptimizerConfig
from coca_mindspeed.errors import ConfigError, Problem, UsageError, raise_problems, show_value
from coca_mindspeed.mindspeed.checks import ignored_keys, other_npus
from coca_mindspeed.mindspeed.keys import TABLE, WRITTEN, places, put, table_of, underscored
from coca_mindspeed.mindspeed.requirements import HOOKS, MindSpeedView
from coca_mindspeed.mindspeed.stages.dataset import RECORD
from coca_mindspeed.mindspeed.start.driver import compose_config
from coca_mindspeed.mindspeed.upstream_keys import shipped_keys
from coca_mindspeed.utils.text_formats import read_yaml, value_of

_SHAPE = {  # Megatron's defaults
    **dict.fromkeys(("untied_embeddings", "qkv_bias", "qk_layernorm"), False),
    "rope_theta": 10_000,
    "norm_eps": 1e-5,
}
_LATER = "???"  # in YAML: a value that the command line gives


def convert(file: Path, hardware: str | None = None) -> tuple[str, list[str]]:
    """The YAML text of a run of ours that gives MindSpeed-RL's keys the values of ``file``, and notes on other values.

    ``hardware`` names the group of the machine; by default it follows from A2 or A3 in the file's name, or else from
    the number of NPUs.

    Raises UsageError for a file in another layout, ConfigError with a problem for each key that cannot be taken.
    """
    if file.suffix != ".yaml" or not file.is_file():
        raise UsageError(f"{file}: expected the path of a file whose name ends in .yaml")
    if not is_mindspeed_rls(file):
        raise UsageError(f"{file}: is not in MindSpeed-RL's own layout: it has no section that only MindSpeed-RL has")
    theirs, heading = _compose(file), f"{file}: cannot be converted; correct it first:"
    raise_problems(shipped_keys().problems(theirs), heading)
    run, notes, problems = _convert(theirs, hardware or _machine_of_name(file.stem))
    sections = {name: content for name, content in run.items() if name != "defaults"}
    validate_config({**sections, "data": {"name": "records", "train": _LATER, **run.get("data", {})}}, file)
    raise_problems(problems, heading)
    head = [f"{file.name} of MindSpeed-RL's own layout, converted by coca-mindspeed config convert", *notes]
    text = yaml.safe_dump(run, sort_keys=False, allow_unicode=True, width=110)
    return "".join(f"# {line}\n" for line in head) + text, notes


def _compose(file: Path) -> dict[str, Any]:
    """The sections of a file in MindSpeed-RL's layout; its ``defaults`` may name MindSpeed-RL's own groups."""
    home = os.environ.get("MINDSPEED_RL_HOME")
    try:
        values = OmegaConf.to_container(compose_config(file, (), Path(home) if home else None), resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{file}: cannot be composed: {error}") from error
    except ConfigError as error:
        hint = "" if home else "\n    if its defaults name files of MindSpeed-RL, set MINDSPEED_RL_HOME"
        raise ConfigError(f"{error}{hint}") from error
    assert isinstance(values, dict)
    sections = {str(name): content for name, content in values.items()}
    for name, content in sections.items():
        if not isinstance(content, Mapping):
            raise ConfigError(f"{file}: {name}: expected a mapping, found {show_value(content)}")
    return underscored(sections)


def _convert(theirs: dict[str, Any], machine: str | None) -> tuple[dict[str, Any], list[str], list[Problem]]:
    """A run of ours from MindSpeed-RL's sections, notes on the exceptions, and values that no key of ours can have."""
    platform = value_of(theirs, "coca.platform", "npu")
    ours: dict[str, Any] = {
        "model": {"compute_dtype": "bfloat16", "architecture": dict(_SHAPE)},
        "optimizer": {"betas": dict(zip("01", OptimizerConfig().betas, strict=True))},
        "hardware": {**_machine(theirs, machine), "platform": platform},
    }
    replaced, problems = list[str](), list[Problem]()

    def replace_by(key: str, other: object) -> None:
        if (found := _pop(theirs, key)) not in (None, other):
            replaced.append(f"{key}={show_value(found)} by {other}")

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
        given = {other: value_of(ours, other) for other in others}
        try:
            value = entry.inverse(*given.values(), found)
        except (TypeError, ValueError, ArithmeticError):
            value = None
        if value is None:
            beside = "".join(f", beside {other}={show_value(each)}" for other, each in given.items())
            problems.append(Problem("no-counterpart", key, found, f"is no value of {name}{beside}"))
        else:
            put(ours, name, value)
    ours["optimizer"]["betas"] = [*ours["optimizer"]["betas"].values()]
    architecture = ours["model"]["architecture"]
    architecture.setdefault("kv_groups", architecture.get("heads"))
    for key in WRITTEN.keys() - TABLE.keys():
        _pop(theirs, key)
    replace_by("megatron_training.dataset_additional_keys", [RECORD])
    put(theirs, "megatron_training.dataset_additional_keys", [RECORD])
    notes = [f"{title}: {', '.join(keys)}" for title, keys in (("ignored", ignored), ("replaced", replaced)) if keys]
    defaults = ["base", {"override /model": "hf"}, {"override /data": "records"}, "_self_"]
    return {"defaults": defaults, **ours, "mindspeed_rl": theirs}, notes, problems


def _machine_of_name(name: str) -> str | None:
    """The group of hardware that the name of a file says: Atlas A2 or A3."""
    atlas = re.findall(r"(?<![^_\W])A[23](?![^_\W])", name.upper())
    return {"A2": "ascend_910b", "A3": "ascend_910c"}[atlas[-1]] if atlas else None


def _machine(theirs: dict[str, Any], name: str | None) -> dict[str, Any]:
    """The section ``hardware`` of a group, or of that whose node holds the NPUs, for the number of NPUs."""
    actor: Any = value_of(theirs, "rl_config.actor_resource.num_npus")
    npus = actor + sum(other_npus(theirs).values()) if isinstance(actor, int) else None
    name = name or ("ascend_910c" if (npus or 0) > 8 else "ascend_910b")
    machine: dict[str, Any] = read_yaml(config_directory() / "hardware" / f"{name}.yaml")["hardware"]
    if npus is not None:
        machine["nodes"] = max(1, npus // machine["npus_per_node"])
        machine["npus_per_node"] = npus // machine["nodes"]
    return machine


def _drop_ignored(theirs: dict[str, Any]) -> list[str]:
    """Remove the keys without effect and return them; keys that ask for another algorithm stay, and are refused."""
    dropped, view = [], MindSpeedView(theirs)
    grpo: Any = [row for row in HOOKS if row.code == "hook-algorithm"]
    others = {problem.key for problem in required(grpo)(view)}
    for problem in list(ignored_keys(view)):
        if problem.key not in others:
            del theirs["rl_config"][problem.key.removeprefix("rl_config.")]
            dropped.append(f"{problem.key}={show_value(problem.value)}")
    return dropped


def _pop(theirs: dict[str, Any], key: str) -> Any:
    """Remove a key from all sections that it may stand in, and return the value that MindSpeed-RL would take."""
    found = None
    for place in places(key, theirs):
        section, _, name = place.rpartition(".")
        if isinstance(content := value_of(theirs, section), dict):
            found = content.pop(name, found)
    return found
