"""Keys of MindSpeed-RL and its verifiers.

``upstream_keys.json`` lists the keys of each release: type, default, and the function of MindSpeed-RL, Megatron,
MindSpeed or MindSpeed-LLM that reads each in a run by the hooks; a key without one has no effect (CONTRIBUTING.md).
MindSpeed-RL itself refuses other keys only inside Ray.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from coca_mindspeed.config.requirements import is_number
from coca_mindspeed.errors import Problem, did_you_mean
from coca_mindspeed.utils.text_formats import value_of

#: Section of a configuration -> the module and class of ``mindspeed_rl.config_cls`` that takes it.
CLASSES = {
    "megatron_training": ("megatron_config", "MegatronConfig"),
    "actor_config": ("megatron_config", "MegatronConfig"),
    "ref_config": ("megatron_config", "MegatronConfig"),
    "reward_config": ("megatron_config", "MegatronConfig"),
    "rl_config": ("rl_config", "RLConfig"),
    "generate_config": ("generate_config", "GenerateConfig"),
    "profiler_config.integrated": ("mindstudio_config", "ProfilerConfig"),
    "msprobe_config": ("mindstudio_config", "MsprobeConfig"),
}
#: Keys whose values are mappings that MindSpeed-RL checks too, against its own default.
NESTED = ("rl_config.actor_resource", "generate_config.sampling_config")
# The sections of a configuration, and mappings without a default in those classes with the names that MindSpeed-RL
# reads in them.
_MAPPINGS: dict[str, dict[str, str]] = {
    "": dict.fromkeys((*(section.partition(".")[0] for section in CLASSES), "model", "coca"), "dict"),
    "profiler_config": {"integrated": "dict"},
    "rl_config.reference_resource": {"num_npus": "any"},
    "rl_config.reward_resource": {"num_npus": "any"},
    "rl_config.integrated_mode_config": {"ref_model_load_path": "any"},
}
SHIPPED = Path(__file__).with_suffix(".json")
ANY = "any"


_TYPES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    ANY: ("", lambda value: True),
    "bool": ("must be true or false", lambda value: isinstance(value, bool)),
    "int": ("must be a whole number", lambda value: is_number(value) and float(value).is_integer()),
    "float": ("must be a number", is_number),
    "str": ("must be text", lambda value: isinstance(value, str)),
    "list": ("must be a list", lambda value: isinstance(value, Sequence) and not isinstance(value, str)),
    "dict": ("must be a mapping", lambda value: isinstance(value, Mapping)),
}


class UpstreamKey(NamedTuple):
    """A key of MindSpeed-RL: type and value of its default, and ``module:function`` that reads it; None: nothing."""

    type: str
    default: Any = None
    reader: str | None = None


@dataclass(frozen=True, slots=True)
class UpstreamKeys:
    """Keys by section; nested sections have dotted names."""

    origin: str
    sections: Mapping[str, Mapping[str, UpstreamKey]]

    def problems(self, values: Mapping[str, Any]) -> list[Problem]:
        """A problem for each key that MindSpeed-RL does not know, and for each value of the wrong type.

        A value needs the type of its default; ``null`` and keys with the default ``null`` take any type.
        """
        actors = (section for section, (module, _) in CLASSES.items() if module == "megatron_config")
        shapes = dict.fromkeys(str(value_of(values, f"{section}.model")) for section in actors)  # others are not read
        known = _MAPPINGS | {name: {key: of.type for key, of in keys.items()} for name, keys in self.sections.items()}
        known |= {f"model.{name}": known["megatron_training"] for name in shapes}
        problems = []
        for section, types in known.items():
            content = value_of(values, section) if section else values
            for key, value in content.items() if isinstance(content, Mapping) else ():
                place = f"{section}.{key}".lstrip(".")
                name = str(key) if isinstance(value, Mapping) else str(key).replace("-", "_")
                if name not in types:
                    wanted = f"one of {', '.join(types)}" if section in _MAPPINGS else f"a key of {self.origin}"
                    expected = f"must be {wanted}{did_you_mean(name, types)}"
                    problems.append(Problem("unknown-key", place, value, expected))
                elif value is not None and not _TYPES[types[name]][1](value):
                    problems.append(Problem("wrong-type", place, value, _TYPES[types[name]][0]))
        return problems


@cache
def shipped_keys(release: str | None = None) -> UpstreamKeys:
    """Keys of a release, by default of all releases.

    Of all, a key whose type differs between releases has any type, and one that a release reads has a reader.
    """
    shipped: dict[str, dict[str, dict[str, list[Any]]]] = json.loads(SHIPPED.read_text(encoding="utf-8"))
    releases = shipped if release is None else {release: shipped[release]}
    sections: dict[str, dict[str, UpstreamKey]] = {}
    for keys in releases.values():
        for section in (*CLASSES, *NESTED):
            merged = sections.setdefault(section, {})
            for name, (kind, default, reader) in keys[list_of(section)].items():
                same = merged.get(name, UpstreamKey(kind))
                merged[name] = UpstreamKey(kind if same.type == kind else ANY, default, same.reader or reader)
    return UpstreamKeys(f"MindSpeed-RL {' or '.join(releases)}", sections)


def list_of(section: str) -> str:
    """The class of a section, whose keys are listed once, or the name of a nested section."""
    return CLASSES[section][1] if section in CLASSES else section


#: This project's grader, which ``coca.grader`` names.
OWN_VERIFIER = "coca"

#: The names that MindSpeed-RL's ``rule_verifier.verifier`` knows; it silently scores 0 for any other.
MINDSPEED_VERIFIERS = (
    *("acc", "format", "step", "strict_format", "base_acc", "math_17k_acc"),
    *("acc_for_dapo", "acc_for_ppo", "math_verify_reward"),
)
