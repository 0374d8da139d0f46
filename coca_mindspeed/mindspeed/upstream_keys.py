"""Keys of MindSpeed-RL: which there are, which of them have no effect, and which our sections set.

``upstream_keys.json`` lists the keys of each release with their types (CONTRIBUTING.md).  MindSpeed-RL itself refuses
others only inside Ray.

A key with an interpolation of our keys alone in ``configs/hardware/ascend.yaml``, such as ``actor_config.lr:
${optimizer.lr}``, belongs to our key.  An interpolation that also reads keys of MindSpeed-RL, such as that of
``max_num_seqs``, is a default that may be changed.
"""

import functools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from coca_mindspeed.config.compose import config_directory
from coca_mindspeed.config.schema import RunConfig
from coca_mindspeed.errors import Problem, did_you_mean, show_value
from coca_mindspeed.utils.text_formats import read_yaml, value_of

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
#: Mappings without a default in those classes -> the names that MindSpeed-RL reads in them.
_NAMES_BELOW = {
    "profiler_config": ("integrated",),
    "rl_config.reference_resource": ("num_npus",),
    "rl_config.reward_resource": ("num_npus",),
    "rl_config.integrated_mode_config": ("ref_model_load_path",),
}
SHIPPED = Path(__file__).with_suffix(".json")
ANY = "any"
_EXPECTED = {
    "bool": "must be true or false",
    "int": "must be a whole number",
    "float": "must be a number",
    "str": "must be text",
    "list": "must be a list",
    "dict": "must be a mapping",
}


@dataclass(frozen=True, slots=True)
class UpstreamKeys:
    """Keys with the types of their defaults, by section; nested sections have dotted names."""

    origin: str
    sections: Mapping[str, Mapping[str, str]]

    def problems(self, values: Mapping[str, Any]) -> list[Problem]:
        """A problem for each section or key that MindSpeed-RL does not know, and for each value of the wrong type.

        A value needs the type of its default; ``null`` and keys with the default ``null`` take any type.
        """
        problems = list(self._unknown_sections(values))
        for section, content, known in self._content(values):
            for key, value in content.items():
                name = str(key).replace("-", "_")
                if name not in known:
                    expected = f"must be a key of {self.origin}{did_you_mean(name, known)}"
                    problems.append(Problem("unknown-key", f"{section}.{key}", value, expected))
                elif not _has_type(value, known[name]):
                    problems.append(Problem("wrong-type", f"{section}.{key}", value, _EXPECTED[known[name]]))
        return problems

    def _unknown_sections(self, values: Mapping[str, Any]) -> Iterator[Problem]:
        top = (*dict.fromkeys(section.partition(".")[0] for section in self.sections), "model", "coca")
        for parent, known in {"": top, **_NAMES_BELOW}.items():
            content = value_of(values, parent) if parent else values
            for name, value in content.items() if isinstance(content, Mapping) else ():
                key = f"{parent}.{name}".lstrip(".")
                if name not in known:
                    expected = f"must be one of {', '.join(known)}{did_you_mean(str(name), known)}"
                    yield Problem("unknown-key", key, value, expected)
                elif not parent and value is not None and not isinstance(value, Mapping):
                    yield Problem("wrong-type", key, value, _EXPECTED["dict"])

    def _content(self, values: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any], Mapping[str, str]]]:
        models = set()
        for section, known in self.sections.items():
            content = value_of(values, section)
            if isinstance(content, Mapping):
                yield section, content, known
                if CLASSES.get(section, ("",))[0] == "megatron_config" and "model" in content:
                    models.add(str(content["model"]))
        shapes = values.get("model")
        for name in sorted(models):  # only the named shapes of a configuration are read
            if isinstance(shapes, Mapping) and isinstance(shapes.get(name), Mapping):
                yield f"model.{name}", shapes[name], self.sections["megatron_training"]


def shipped_keys(release: str | None = None) -> UpstreamKeys:
    """Keys of a release, by default of all releases; a key whose type differs between releases has any type."""
    known: dict[str, dict[str, dict[str, str]]] = json.loads(SHIPPED.read_text(encoding="utf-8"))
    releases = known if release is None else {release: known[release]}
    sections: dict[str, dict[str, str]] = {}
    for keys in releases.values():
        for section in (*CLASSES, *NESTED):
            merged = sections.setdefault(section, {})
            for key, kind in keys[list_of(section)].items():
                merged[key] = kind if merged.get(key, kind) == kind else ANY
    return UpstreamKeys(f"MindSpeed-RL {' or '.join(releases)}", sections)


def list_of(section: str) -> str:
    """The class of a section, whose keys are listed once, or the name of a nested section."""
    return CLASSES[section][1] if section in CLASSES else section


def _has_type(value: Any, kind: str) -> bool:
    if value is None or kind == ANY:
        return True
    if kind == "bool" or isinstance(value, bool):
        return kind == "bool" and isinstance(value, bool)
    if kind in ("int", "float"):
        return isinstance(value, int | float) and (kind == "float" or float(value).is_integer())
    if kind == "list":
        return isinstance(value, Sequence) and not isinstance(value, str)
    return isinstance(value, str if kind == "str" else Mapping)


#: This project's grader, which ``coca.grader`` names.
OWN_VERIFIER = "coca"

#: The names that MindSpeed-RL's ``rule_verifier.verifier`` knows; it silently scores 0 for any other.
MINDSPEED_VERIFIERS = (
    "acc",
    "format",
    "step",
    "strict_format",
    "base_acc",
    "math_17k_acc",
    "acc_for_dapo",
    "acc_for_ppo",
    "math_verify_reward",
)

_ADVANTAGES = "advantages are CoCA's, of both segments"
_LOSS = "the loss is CoCA's (coca.method.loss_aggregation, rl_config.clip_ratio)"
_CUT_OFF = "a truncated response is graded as it is"
_IGNORED = {
    **dict.fromkeys(("adv_estimator", "gamma", "lam"), _ADVANTAGES),
    "use_kl_in_reward": "rewards hold no KL term; rl_config.init_kl_coef adds one to the loss",
    **dict.fromkeys(("token_level_loss", "clip_higher_enable", "clip_ratio_low", "clip_ratio_high"), _LOSS),
    "cliprange_value": "there is no critic",
    **dict.fromkeys(("overlong_buffer_enable", "overlong_buffer", "overlong_buffer_penalty_factor"), _CUT_OFF),
}
#: Keys of ``rl_config`` that choose another algorithm, and the values that MindSpeed-RL's GRPO has.
GRPO_VALUES: dict[str, tuple[Any, ...]] = {
    "adv_estimator": ("group_norm",),
    "gamma": (1.0,),
    "kl_penalty": ("low_var_kl", "kl", "abs", "mse"),
    **dict.fromkeys(("use_kl_in_reward", "clip_higher_enable", "overlong_buffer_enable"), (False,)),
}
_REFERENCE = ("kl_penalty", "kl_ctrl_type", "ref_dispatch_size", "ref_max_packing_token_size")
_VERIFIER = ("verifier_parallel", "verifier_timeout", "verifier_weight")


def ignored_keys(config: Mapping[str, Any], *, reference: bool) -> Iterator[Problem]:
    """A problem for each key of ``rl_config`` that has no effect; ``reference``: whether there is a KL term."""
    rl, reasons = config.get("rl_config") or {}, dict(_IGNORED)
    if not reference:
        reasons |= dict.fromkeys(_REFERENCE, "there is no reference model (rl_config.init_kl_coef is 0)")
    if OWN_VERIFIER in (rl.get("verifier_function") or ()):
        reasons |= dict.fromkeys(_VERIFIER, "this project's grader takes its options from coca.grading")
    for key, reason in reasons.items():
        if key in rl:
            yield Problem("ignored-key", f"rl_config.{key}", rl[key], f"has no effect: {reason}")


_INTERPOLATION = re.compile(r"\$\{([\w.]+)\}")


@functools.cache
def mapped_keys(platform: str = "npu") -> dict[str, str]:
    """Key of MindSpeed-RL -> the interpolation of our keys that sets it; of the CPU shim for the platform ``host``."""
    directory = config_directory() / "hardware"
    own_check = "rl_config.actor_resource.num_npus"  # separate workers take a part: hardware-npus compares the sum
    replaced = dict(leaves(read_yaml(directory / "host.yaml")["mindspeed_rl"])) if platform == "host" else {}
    found = {}
    for key, value in leaves(read_yaml(directory / "ascend.yaml")["mindspeed_rl"]):
        ours = our_keys(value) if isinstance(value, str) else []
        theirs = any(each.startswith("mindspeed_rl.") for each in ours)
        if ours and not theirs and key not in replaced and key != own_check:
            found[key] = value
    return found


def our_keys(interpolation: str) -> list[str]:
    """The keys that an interpolation reads."""
    return _INTERPOLATION.findall(interpolation)


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
