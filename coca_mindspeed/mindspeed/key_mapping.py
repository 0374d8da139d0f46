"""Keys of MindSpeed-RL that our sections set, read from the interpolations in ``configs/hardware/ascend.yaml``.

A key with an interpolation of our keys alone, such as ``actor_config.lr: ${optimizer.lr}``, belongs to our key. An
interpolation that also reads keys of MindSpeed-RL, such as that of ``max_num_seqs``, is a default that may be changed.
"""

import functools
import re
from collections.abc import Iterator, Mapping
from typing import Any

from omegaconf import OmegaConf

from coca_mindspeed.config.compose import config_directory
from coca_mindspeed.config.schema import RunConfig
from coca_mindspeed.errors import Problem, show_value
from coca_mindspeed.utils.text_formats import read_yaml, value_of

_REFERENCE = re.compile(r"\$\{([\w.]+)\}")
# Separate workers take a part of the NPUs: the check hardware-npus compares the sum.
_OWN_CHECK = "rl_config.actor_resource.num_npus"


@functools.cache
def mapped_keys(platform: str = "npu") -> dict[str, str]:
    """Key of MindSpeed-RL -> the interpolation of our keys that sets it; of the CPU shim for the platform ``host``."""
    directory = config_directory() / "hardware"
    found = {
        key: value for key, value in leaves(read_yaml(directory / "ascend.yaml")["mindspeed_rl"]) if _is_ours(value)
    }
    replaced = dict(leaves(read_yaml(directory / "host.yaml")["mindspeed_rl"])) if platform == "host" else {}
    return {key: value for key, value in found.items() if key not in replaced and key != _OWN_CHECK}


def our_keys(interpolation: str) -> list[str]:
    """The keys that an interpolation reads."""
    return _REFERENCE.findall(interpolation)


def leaves(section: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys and values of nested mappings."""
    for name, value in section.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def mapped_values(run: RunConfig) -> dict[str, tuple[Any, str]]:
    """Key of MindSpeed-RL -> the value that our sections give it, and the names of our keys."""
    mapping = mapped_keys(run.hardware.platform)
    values = OmegaConf.create({**run.model_dump(mode="json", exclude={"mindspeed_rl"}), "mapped": mapping})
    resolved = OmegaConf.to_container(values.mapped, resolve=True)
    assert isinstance(resolved, dict)
    return {key: (resolved[key], ", ".join(our_keys(text))) for key, text in mapping.items()}


def set_twice(run: RunConfig, written: Mapping[str, tuple[Any, str]]) -> Iterator[Problem]:
    """A problem for each key of MindSpeed-RL whose value differs from that of our keys that set it.

    ``written`` are keys that get their value when the run file is written; unlike the others, they may be absent.
    """
    theirs = underscored(run.mindspeed_rl)
    shapes = value_of(theirs, "actor_config.model", value_of(theirs, "megatron_training.model"))
    for key, (wanted, source) in {**mapped_values(run), **written}.items():
        for number, place in enumerate(places(key, str(shapes).replace("-", "_"))):
            absent = wanted if key in written or number else None
            if (difference := _difference(wanted, value_of(theirs, place, absent))) is None:
                continue
            below, should, found = difference
            expected = "must be absent" if key in written else f"must be {show_value(should)}"
            expected, fix = f"{expected}, set by {source}{below}", f"set {source}{below} instead"
            yield Problem("set-twice", f"mindspeed_rl.{place}{below}", found, expected, fix)


def _difference(wanted: Any, found: Any) -> tuple[str, Any, Any] | None:
    """The name below the key, and both values, of the first difference; names in ``found`` come first."""
    if isinstance(found, Mapping):
        for name, value in leaves(found):
            if value != (should := value_of(wanted, name)):
                return f".{name}", should, value
    return None if found == wanted else ("", wanted, found)


def places(key: str, shapes: str) -> list[str]:
    """The keys that mean the same, the first one first: a name of the actor may stand in any of its sections."""
    section, _, name = key.rpartition(".")
    actor = {"model.actor": f"model.{shapes}", "megatron_training": "megatron_training", "actor_config": "actor_config"}
    first = actor.get(section, section)
    others = [each for each in actor.values() if each != first] if section in actor else []
    return [f"{each}.{name}" for each in (first, *others)]


def underscored(values: Mapping[str, Any]) -> dict[str, Any]:
    """Nested mappings with underscores for dashes in their names, as MindSpeed-RL reads them."""
    return {
        str(name).replace("-", "_"): underscored(value) if isinstance(value, Mapping) else value
        for name, value in values.items()
    }


def _is_ours(value: Any) -> bool:
    keys = our_keys(value) if isinstance(value, str) else []
    return bool(keys) and not any(key.startswith("mindspeed_rl.") for key in keys)
