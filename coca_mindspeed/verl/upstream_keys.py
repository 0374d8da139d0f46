"""The keys that verl knows: those of its own configuration, and the fields of the dataclasses of its sections.

``upstream_keys.json`` lists verl's keys, and the place in verl that reads each in a run by the plugin; a key without
one has no effect (CONTRIBUTING.md).

verl's workers build a section with ``_target_`` as that dataclass after they have been placed: a key that the class
lacks, or a value that it refuses, would end the run there.
"""

import importlib
import importlib.util
import json
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from hydra.utils import instantiate
from omegaconf import OmegaConf

from coca_mindspeed.config.compose import VERLS_OWN
from coca_mindspeed.config.requirements import KeyClasses
from coca_mindspeed.errors import ConfigError, Problem, did_you_mean, show_value
from coca_mindspeed.utils.packages import require
from coca_mindspeed.utils.text_formats import value_of
from coca_mindspeed.verl.requirements import ACTOR, CHECKED, ROLLOUT, SHOWN
from coca_mindspeed.verl.settings import NAME

#: Values of verl's ``model_engine``, which chooses the sections of its configuration.
ENGINES = ("dp", "megatron")
SHIPPED = Path(__file__).with_suffix(".json")
#: Sections that verl reads only for parts that a run by the plugin does not have; a key in them is one of verl's own if
#: verl reads it elsewhere.
UNREAD_SECTIONS = {
    "critic": "there is no critic",
    "actor_rollout_ref.ref": "there is no reference model",
    "actor_rollout_ref.actor.policy_loss": "our loss takes the place of verl's",
    "reward.reward_model": "only the grader decides whether an answer is right",
    "reward.custom_reward_function": "only the grader decides whether an answer is right",
    "reward.sandbox_fusion": "the grader code has a sandbox of its own",
    "reward_model": "verl's trainer reads reward.reward_model",
    "custom_reward_function": "verl's trainer reads reward.custom_reward_function",
    "sandbox_fusion": "verl's trainer reads reward.sandbox_fusion",
    "distillation": "the objective has no teacher",
    "algorithm.pf_ppo": "our advantages take the place of verl's",
    "actor_rollout_ref.rollout.multi_turn": "a response is one turn",
}
#: Keys that the launch script sets by ``--output`` and ``--resume``.
SET_BY_LAUNCH = (
    "trainer.default_local_dir",
    "trainer.rollout_data_dir",
    "trainer.validation_data_dir",
    "trainer.resume_mode",
)
_TARGET = "_target_"
_ABSENT = object()


def directory_of_verl() -> Path:
    """``trainer/config`` of the installed verl, which is not imported."""
    require("verl", purpose="a run on verl is checked by verl's own configuration (docs/verl.md)")
    spec = importlib.util.find_spec("verl")
    folders = [] if spec is None else list(spec.submodule_search_locations or ())
    return Path(folders[0]) / "trainer" / "config"


def verls_defaults(engine: Any) -> Mapping[str, Any]:
    """Verl's own configuration, with its interpolations as they are written."""
    return _composed(directory_of_verl().resolve(), engine if engine in ENGINES else ENGINES[0])


@cache
def _composed(directory: Path, engine: str) -> Mapping[str, Any]:
    with initialize_config_dir(str(directory), version_base=None):
        defaults: Any = OmegaConf.to_container(compose(VERLS_OWN, overrides=[f"model_engine={engine}"]))
    return dict(defaults)


@cache
def readers() -> dict[str, str | None]:
    """Each key of verl's configuration, and the function that reads it; None: nothing does so in our runs."""
    shipped: dict[str, str | None] = json.loads(SHIPPED.read_text(encoding="utf-8"))
    return shipped


@cache
def classes() -> KeyClasses:
    """The classes of verl's keys."""
    return KeyClasses(readers(), CHECKED, SHOWN, frozenset(SET_BY_LAUNCH))


def changed_keys(written: Mapping[str, Any], values: Mapping[str, Any], kind: str) -> Iterator[tuple[str, Any, Any]]:
    """Keys of a class, with value and verl's default, that differ from the default.

    ``written`` is a configuration with its interpolations as they are written, ``values`` the same with their results.
    """
    for key, default in leaves(verls_defaults(written.get("model_engine"))):
        value = value_of(values, key)
        if value_of(written, key) != default and value != default and classes().of(key) == kind:
            yield key, value, default


def keys_without_effect(written: Mapping[str, Any], values: Mapping[str, Any]) -> Iterator[Problem]:
    """A problem for each key that nothing reads and that has no row among the requirements, but another value."""
    for key, value, default in changed_keys(written, values, "none"):
        if key not in CHECKED:
            sections = (why for section, why in UNREAD_SECTIONS.items() if key.startswith(f"{section}."))
            reason = next(sections, "nothing in verl reads it in a run by the plugin")
            yield Problem(
                "no-effect", key, value, f"must be {show_value(default)} or absent: it has no effect: {reason}"
            )


def unknown_keys(values: Mapping[str, Any], overrides: Sequence[str]) -> Iterator[Problem]:
    """A problem for each key of a composed configuration that verl does not know.

    An override with a plus adds a key to a section that is no dataclass.  Raises ConfigError if a dataclass that has to
    be asked cannot be imported.
    """
    known = verls_defaults(values.get("model_engine"))
    verls = {key: value for key, value in values.items() if key != NAME}
    for key, value, section in _unknown(verls, known, "", added_keys(overrides)):
        if section is None:
            expected = f"must be a key of verl's configuration{nearest_key(key, values)}"
            yield Problem("unknown-key", key, value, expected, f"to add a key that verl reads: +{key}=...")
        else:
            expected = f"must be a field of verl's {section}, which is made of this section{nearest_key(key, values)}"
            yield Problem("unknown-key", key, value, expected, "remove it: verl's workers would refuse it")


def leaves(values: Mapping[str, Any], under: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys and values of nested mappings; an empty mapping is a value, the names of dataclasses are left out."""
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{under}{name}.")
        elif name != _TARGET:
            yield f"{under}{name}", value


def added_keys(overrides: Sequence[str]) -> list[str]:
    """The keys that overrides add with a plus."""
    return [override.lstrip("+").partition("=")[0] for override in overrides if override.startswith("+")]


def _unknown(
    values: Mapping[str, Any], defaults: Mapping[str, Any], under: str, added: Sequence[str]
) -> Iterator[tuple[str, Any, str | None]]:
    """Unknown keys with their values, and the dataclass of their section if it has one."""
    target = values.get(_TARGET)
    for name, value in values.items():
        key = f"{under}{name}"
        if name in defaults:
            # An empty section and the overrides of another configuration take any key.
            if isinstance(value, Mapping) and isinstance(defaults[name], Mapping) and "override_" not in name:
                yield from _unknown(value, defaults[name], f"{key}.", added) if defaults[name] else ()
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
        if near := did_you_mean(name, (each for each in _leaves(part, under) if each != key)):
            return near
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
