"""Keys of verl's configuration, to refuse the others: those of the installed verl, or the shipped ones of 0.9.1.

``python -m coca_mindspeed.verl.upstream_keys DIRECTORY`` writes ``upstream_keys.json`` from verl's ``trainer/config``.
"""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from coca_mindspeed.errors import Problem, nearest
from coca_mindspeed.verl.settings import NAME

_SHIPPED = Path(__file__).with_suffix(".json")
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
            expected = f"must be a key of verl's configuration{nearest(str(name), known)}"
            yield Problem("unknown-key", key, value, expected, f"to add a key that verl reads: +{key}=...")


def _names(values: Mapping[str, Any]) -> dict[str, Any]:
    """Names below names; None for a value, an empty mapping and overrides of another configuration, which are free."""
    nested = {name for name, value in values.items() if isinstance(value, Mapping) and value}
    return {name: _names(values[name]) if name in nested and "override_" not in name else None for name in values}


if __name__ == "__main__":
    _SHIPPED.write_text(json.dumps(known_keys(Path(sys.argv[1])), indent=1, sort_keys=True) + "\n", encoding="utf-8")
