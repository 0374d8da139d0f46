"""The keys that verl knows: those of its own configuration, and the fields of the dataclasses of its sections.

verl's workers build a section with ``_target_`` as that dataclass after they have been placed: a key that the class
lacks, or a value that it refuses, would end the run there.
"""

import importlib
import importlib.util
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from hydra.utils import instantiate
from omegaconf import OmegaConf

from coca_mindspeed.config.compose import VERLS_OWN
from coca_mindspeed.errors import ConfigError, Problem, did_you_mean
from coca_mindspeed.utils.packages import require
from coca_mindspeed.utils.text_formats import value_of
from coca_mindspeed.verl.requirements import ACTOR, ROLLOUT
from coca_mindspeed.verl.settings import NAME

_ENGINES = ("dp", "megatron")
_TARGET = "_target_"
_ABSENT = object()


def directory_of_verl() -> Path:
    """``trainer/config`` of the installed verl, which is not imported."""
    require("verl", purpose="a run on verl is checked by verl's own configuration (docs/verl.md)")
    spec = importlib.util.find_spec("verl")
    folders = [] if spec is None else list(spec.submodule_search_locations or ())
    return Path(folders[0]) / "trainer" / "config"


def unknown_keys(values: Mapping[str, Any], overrides: Sequence[str]) -> Iterator[Problem]:
    """A problem for each key of a composed configuration that verl does not know.

    An override with a plus adds a key to a section that is no dataclass.  Raises ConfigError if a dataclass that has to
    be asked cannot be imported.
    """
    engine = values.get("model_engine")
    with initialize_config_dir(str(directory_of_verl().resolve()), version_base=None):
        composed = compose(VERLS_OWN, overrides=[f"model_engine={engine if engine in _ENGINES else _ENGINES[0]}"])
    known: Any = OmegaConf.to_container(composed)
    verls = {key: value for key, value in values.items() if key != NAME}
    for key, value, section in _unknown(verls, known, "", added_keys(overrides)):
        if section is None:
            expected = f"must be a key of verl's configuration{nearest_key(key, values)}"
            yield Problem("unknown-key", key, value, expected, f"to add a key that verl reads: +{key}=...")
        else:
            expected = f"must be a field of verl's {section}, which is made of this section{nearest_key(key, values)}"
            yield Problem("unknown-key", key, value, expected, "remove it: verl's workers would refuse it")


def added_keys(overrides: Sequence[str]) -> list[str]:
    """The keys that overrides add with a plus."""
    return [override.lstrip("+").partition("=")[0] for override in overrides if override.startswith("+")]


def _unknown(
    values: Mapping[str, Any], known: Mapping[str, Any], under: str, added: Sequence[str]
) -> Iterator[tuple[str, Any, str | None]]:
    """Unknown keys with their values, and the dataclass of their section if it has one."""
    target = values.get(_TARGET)
    for name, value in values.items():
        key = f"{under}{name}"
        if name in known:
            # An empty section and the overrides of another configuration take any key.
            if isinstance(value, Mapping) and isinstance(known[name], Mapping) and "override_" not in name:
                yield from _unknown(value, known[name], f"{key}.", added) if known[name] else ()
        elif isinstance(target, str):
            if name not in _fields(target):
                yield key, value, target.rpartition(".")[2]
        elif not any(f"{key}.".startswith(f"{each}.") or each.startswith(f"{key}.") for each in added):
            yield key, value, None


def _fields(target: str) -> set[str]:
    """The fields of a dataclass, by its dotted name."""
    module, _, name = target.rpartition(".")
    try:
        with _quiet():
            found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{_TARGET}={target}: verl's class cannot be imported: {error}") from error
    return {field.name for field in fields(found)} if is_dataclass(found) else set()


def nearest_key(key: str, values: Mapping[str, Any]) -> str:
    """``, did you mean ...?`` with the nearest keys of a configuration: in the same section or below, else anywhere."""
    section, _, name = key.rpartition(".")
    while section and not isinstance(value_of(values, section), Mapping):
        section = section.rpartition(".")[0]
    inside = value_of(values, section) if section else {}
    for part, under in ((inside, f"{section}."), (values, "")):
        if found := did_you_mean(name, (each for each in _leaves(part, under) if each != key)):
            return found
    return ""


def _leaves(values: Mapping[str, Any], under: str) -> Iterator[str]:
    for name, value in values.items():
        yield f"{under}{name}"
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{under}{name}.")


def unknown_overrides(values: Mapping[str, Any], overrides: Sequence[str]) -> list[Problem]:
    """A problem for each override of a key that a configuration, composed without them, does not have."""
    named = (override.partition("=") for override in overrides if not override.startswith(("+", "~", "hydra.")))
    return [
        Problem("unknown-key", key, value, f"must be a key of verl's configuration{nearest_key(key, values)}")
        for key, equals, value in named
        if equals and "@" not in key and "/" not in key and value_of(values, key, _ABSENT) is _ABSENT
    ]


def refused_sections(values: Mapping[str, Any]) -> Iterator[Problem]:
    """A problem for each section of the actor and the rollout that verl's dataclass of it refuses."""
    for key in (ACTOR, ROLLOUT):
        section = value_of(values, key)
        if not isinstance(section, Mapping) or _TARGET not in section:
            continue
        try:
            with _quiet():
                instantiate(section, _convert_="partial")  # as verl's omega_conf_to_dataclass
        except HydraException as error:
            name = str(section[_TARGET]).rpartition(".")[2]
            reason = str(error.__cause__ or error)
            yield Problem("verls-class", key, section, f"must be accepted by verl's {name}: {reason}")


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the warnings of verl's import about accelerators that this machine does not have."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
