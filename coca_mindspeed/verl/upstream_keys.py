"""The keys that verl knows: those of its own configuration."""

import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from coca_mindspeed.errors import Problem, did_you_mean
from coca_mindspeed.utils.packages import require
from coca_mindspeed.verl.settings import NAME

#: The file that verl's own configuration starts from, by its name in ``defaults``.
VERLS_OWN = "ppo_trainer"
_ENGINES = ("dp", "megatron")


def directory_of_verl() -> Path:
    """``trainer/config`` of the installed verl, which is not imported."""
    require("verl", purpose="a run on verl is checked by verl's own configuration (docs/verl.md)")
    spec = importlib.util.find_spec("verl")
    folders = [] if spec is None else list(spec.submodule_search_locations or ())
    return Path(folders[0]) / "trainer" / "config"


def unknown_keys(values: Mapping[str, Any], overrides: Sequence[str]) -> Iterator[Problem]:
    """A problem for each key that verl's configuration lacks, unless an override adds it with a plus.

    Hydra itself refuses such a key in an override, but not in a file.
    """
    with initialize_config_dir(str(directory_of_verl().resolve()), version_base=None):
        engines = [compose(VERLS_OWN, overrides=[f"model_engine={engine}"]) for engine in _ENGINES]
    for config in engines:
        OmegaConf.set_struct(config, False)
    known: Any = OmegaConf.to_container(OmegaConf.merge(*engines))
    added = [override.lstrip("+").partition("=")[0] for override in overrides if override.startswith("+")]
    yield from _unknown({key: value for key, value in values.items() if key != NAME}, known, "", added)


def _unknown(values: Mapping[str, Any], known: Mapping[str, Any], under: str, added: list[str]) -> Iterator[Problem]:
    for name, value in values.items():
        key = f"{under}{name}"
        if any(f"{key}.".startswith(f"{each}.") for each in added):
            continue
        if name in known:
            # An empty section and the overrides of another configuration take any key.
            if isinstance(value, Mapping) and isinstance(known[name], Mapping) and "override_" not in name:
                yield from _unknown(value, known[name], f"{key}.", added) if known[name] else ()
        elif not any(each.startswith(f"{key}.") for each in added):
            expected = f"must be a key of verl's configuration{did_you_mean(str(name), known)}"
            yield Problem("unknown-key", key, value, expected, f"to add a key that verl reads: +{key}=...")
