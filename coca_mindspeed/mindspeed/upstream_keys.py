"""Keys of MindSpeed-RL, read from the sources of its config classes without importing them.

MindSpeed-RL refuses unknown keys only inside Ray, when the cluster is already up.
"""

import ast
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coca_mindspeed.config.checks import Problem
from coca_mindspeed.errors import ConfigError, nearest
from coca_mindspeed.mindspeed.stages.verifiers import OWN_VERIFIER

#: Section of a configuration -> the module and class of ``mindspeed_rl.config_cls`` that takes it.
_CLASSES = {
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
_NESTED = ("rl_config.actor_resource", "generate_config.sampling_config")


@dataclass(frozen=True, slots=True)
class UpstreamKeys:
    """Keys by section; nested sections have dotted names."""

    root: Path
    sections: Mapping[str, frozenset[str]]

    def unknown(self, values: Mapping[str, Any]) -> list[Problem]:
        """A problem for each key that MindSpeed-RL would refuse."""
        reason = f"must be a key of the MindSpeed-RL at {self.root}"
        return [
            Problem("unknown-key", f"{section}.{key}", value, f"{reason}{nearest(name, known)}")
            for section, content, known in self._content(values)
            for key, value in content.items()
            if (name := str(key).replace("-", "_")) not in known
        ]

    def _content(self, values: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any], frozenset[str]]]:
        models = set()
        for section, known in self.sections.items():
            content: Any = values
            for part in section.split("."):
                content = content.get(part) if isinstance(content, Mapping) else None
            if isinstance(content, Mapping):
                yield section, content, known
                if _CLASSES.get(section, ("",))[0] == "megatron_config" and "model" in content:
                    models.add(str(content["model"]))
        shapes = values.get("model")
        for name in sorted(models):  # of the shapes that a configuration may hold, only those that are named are read
            if isinstance(shapes, Mapping) and isinstance(shapes.get(name), Mapping):
                yield f"model.{name}", shapes[name], self.sections["megatron_training"]


def read_upstream_keys(root: Path) -> UpstreamKeys:
    """The keys that the MindSpeed-RL below ``root`` knows.

    Raises:
        ConfigError: there is no config class where it should be.
    """
    sections: dict[str, frozenset[str]] = {}
    for section, (module, name) in _CLASSES.items():
        path = root / "mindspeed_rl" / "config_cls" / f"{module}.py"
        defaults = _defaults(path, name)
        known = frozenset(defaults)
        sections[section] = known | {"model"} if module == "megatron_config" else known
        for nested in _NESTED:
            if nested.startswith(f"{section}."):
                sections[nested] = _literal_keys(defaults.get(nested.removeprefix(f"{section}.")), path, nested)
    return UpstreamKeys(root, sections)


def checkout_keys(environment: Mapping[str, str] = os.environ) -> UpstreamKeys | None:
    """The keys of the MindSpeed-RL named by ``MINDSPEED_RL_HOME``, or None if it is not set.

    Raises:
        ConfigError: it is not a MindSpeed-RL.
    """
    value = environment.get("MINDSPEED_RL_HOME", "")
    return read_upstream_keys(Path(value)) if value else None


def _defaults(path: Path, name: str) -> dict[str, ast.expr | None]:
    """Attributes that ``__init__`` sets on ``self`` before it reads the configuration: their names are the keys."""
    try:
        module = ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, UnicodeDecodeError) as error:
        raise ConfigError(f"MINDSPEED_RL_HOME: expected MindSpeed-RL's class {name} in {path}: {error}") from error
    for statement in ast.walk(module):
        if isinstance(statement, ast.ClassDef) and statement.name == name:
            for method in statement.body:
                if isinstance(method, ast.FunctionDef) and method.name == "__init__":
                    return dict(_assigned(method))
    raise ConfigError(f"MINDSPEED_RL_HOME: expected MindSpeed-RL's class {name} with an __init__ in {path}, found none")


def _assigned(method: ast.FunctionDef) -> Iterator[tuple[str, ast.expr | None]]:
    for statement in method.body:
        if isinstance(statement, ast.Expr) and _is_update(statement.value):
            return
        for node in ast.walk(statement):
            if not isinstance(node, ast.Assign | ast.AnnAssign):
                continue
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self":
                    yield target.attr, node.value


def _is_update(call: ast.expr) -> bool:
    return isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "update"


def _literal_keys(value: ast.expr | None, path: Path, name: str) -> frozenset[str]:
    if not isinstance(value, ast.Dict):
        raise ConfigError(f"MINDSPEED_RL_HOME: expected {name}'s default in {path} to be a mapping, found none")
    return frozenset(str(key.value) for key in value.keys if isinstance(key, ast.Constant))


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
_REFERENCE = ("kl_penalty", "kl_ctrl_type", "ref_dispatch_size", "ref_max_packing_token_size")
_VERIFIER = ("verifier_parallel", "verifier_timeout", "verifier_weight")


def ignored_keys(config: Mapping[str, Any], *, reference: bool) -> Iterator[Problem]:
    """A problem for each key that has no effect.

    Args:
        config: MindSpeed-RL's sections.
        reference: whether there is a KL term.
    """
    rl, reasons = config.get("rl_config") or {}, dict(_IGNORED)
    if not reference:
        reasons |= dict.fromkeys(_REFERENCE, "there is no reference model (rl_config.init_kl_coef is 0)")
    if OWN_VERIFIER in (rl.get("verifier_function") or ()):
        reasons |= dict.fromkeys(_VERIFIER, "this project's grader takes its options from coca.grading")
    for key, reason in reasons.items():
        if key in rl:
            yield Problem("ignored-key", f"rl_config.{key}", rl[key], f"has no effect: {reason}")
