"""Checks of a cluster run before it starts: its requirements, its layout, its model, and keys that are set twice.

Other conditions are left to MindSpeed-RL's ``validate_rl_args``, which refuses a run when the driver starts.
"""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

from coca_mindspeed.config.checks import CHECKS, same_file
from coca_mindspeed.config.requirements import KeyClasses, effects, required
from coca_mindspeed.errors import Check, ConfigError, Problem, find_problems, problems_of, raise_problems, show_value
from coca_mindspeed.mindspeed.cluster_run import ClusterRun
from coca_mindspeed.mindspeed.keys import (
    RENAMES,
    TABLE,
    WRITTEN,
    actor_sections,
    leaves,
    of_the_actor,
    set_twice,
    underscored,
    written_as,
)
from coca_mindspeed.mindspeed.requirements import (
    HOOK_CHECKS,
    HOOKS,
    IGNORED,
    HookConfig,
    MindSpeedView,
    run_requirements,
)
from coca_mindspeed.mindspeed.resolved_config import KEYS
from coca_mindspeed.mindspeed.start.process import CocaSettings
from coca_mindspeed.mindspeed.start.run_file import StageFiles, mindspeed_values
from coca_mindspeed.mindspeed.upstream_keys import shipped_keys
from coca_mindspeed.scoring.settings import checked_section, method_section

_SHOWN = frozenset(
    (
        *(of_the_actor(key.removeprefix("mindspeed_rl.")) for key in KEYS.values() if key.startswith("mindspeed_rl.")),
        "megatron_training.model",
        "megatron_training.no_shuffle",
        "rl_config.hccl_buffersize",
        "rl_config.integrated_mode_config",
        "rl_config.reference_resource",
        "rl_config.reward_resource",
        "rl_config.runtime_env_path",
        "rl_config.use_integrated_worker",
        *(f"generate_config.sampling_config.{name}" for name in ("detokenize", "logprobs")),
    )
)
_WRITTEN_AT_START = ("finetune", "no_load_optim", "no_load_rng")  # a resumed run has other values


@cache
def key_classes() -> KeyClasses:
    """The classes of MindSpeed-RL's keys; ``megatron_training`` stands for the actor's sections."""
    sections = shipped_keys().sections.items()
    readers = {f"{section}.{name}": key.reader for section, keys in sections for name, key in keys.items()}
    written = (*TABLE, *WRITTEN, *(f"megatron_training.{name}" for name in _WRITTEN_AT_START))
    return KeyClasses(readers, effects(HOOKS, IGNORED), _SHOWN, frozenset(map(of_the_actor, written)))


def changed_keys(view: MindSpeedView, kind: str) -> Iterator[tuple[str, Any, Any]]:
    """Keys of a class with value and MindSpeed-RL's default, if they differ."""
    shapes, *_ = actor_sections(view.values)
    for place, value in leaves(underscored(view.values)):
        key = of_the_actor(place.replace(f"{shapes}.", "model.actor."))
        if key in view.DEFAULTS and value != (default := view.DEFAULTS[key]) and key_classes().of(key) == kind:
            yield place, value, default


def ignored_keys(view: MindSpeedView) -> Iterator[Problem]:
    """Problems of MindSpeed-RL's keys without effect."""
    yield from required(IGNORED)(view)
    for place, value, default in changed_keys(view, "none"):
        if of_the_actor(place) not in key_classes().rows:
            reason = "it has no effect: nothing in MindSpeed-RL or Megatron reads it in such a run"
            yield Problem("ignored-key", place, value, f"must be {show_value(default)} or absent: {reason}")


def run_problems(start: ClusterRun) -> list[Problem]:
    """Find all problems of a cluster run."""
    of_run = (*CHECKS, required(run_requirements(start.iterations)))
    train, evaluate = (start.key(f"data.{name}") for name in ("train", "evaluate"))
    files = start.run.data.train, evaluate, start.run.data.evaluate, f"set {evaluate}=null"
    checks: tuple[Check[ClusterRun], ...] = (
        lambda start: (problem for check in of_run for problem in check(start.run)),
        lambda _: same_file(train, *files),
        lambda start: start.model.problems,
        *([] if start.native else [lambda start: set_twice(start.run), _npus]),
        _layout,
        _driver,
        *([] if start.native else [_upstream_keys]),
    )
    return [problem._replace(key=start.key(problem.key)) for problem in find_problems(start, checks)]


def _layout(start: ClusterRun) -> Iterator[Problem]:
    """Problems of the layout, under configuration keys."""
    for problem in start.layout_problems:
        ours = problem.key == "mini_batch" and not start.native
        value = start.run.trainer.minibatches if ours else problem.value
        yield problem._replace(key=KEYS[problem.key], value=value)


def _npus(start: ClusterRun) -> Iterator[Problem]:
    hardware, others = start.run.hardware, other_npus(start.run.mindspeed_rl)
    expected = hardware.nodes * hardware.npus_per_node - sum(others.values())
    if (npus := start.resolved.npus) != expected:
        reason = "".join(f", {number} of them for rl_config.{key}" for key, number in others.items())
        reason = f"hardware has {hardware.nodes} x {hardware.npus_per_node} NPUs{reason}"
        fix = f"set it to {expected}" if expected > 0 else ""
        yield Problem("hardware-npus", KEYS["npus"], npus, reason, fix)


def other_npus(values: dict[str, Any]) -> dict[str, int]:
    """Key -> NPUs that MindSpeed-RL reserves besides the actor's if its workers are separate."""
    rl = values.get("rl_config", {})
    if MindSpeedView(values).integrated:
        return {}
    groups = ["reference_resource"] * MindSpeedView(values).reference + ["reward_resource"]
    npus = {key: (rl.get(key) or {}).get("num_npus") for key in groups}
    return {key: int(count) for key, count in npus.items() if count}


def _driver(start: ClusterRun) -> Iterator[Problem]:
    """Problems that the driver would find in its configuration, by the keys that set them."""
    # The number of iterations and the directory are unknown to the conditions; any do.
    values = mindspeed_values(start, start.iterations or 1, StageFiles(Path("runs")))
    try:
        split_config(OmegaConf.create(values))
    except ConfigError as error:
        for problem in problems_of(error, "mindspeed-rl", "coca"):
            if start.native:
                yield problem
                continue
            if problem.code != "hook-warmup" or not start.run.optimizer.warmup_steps:  # else found in our own section
                yield problem._replace(key=RENAMES.get(problem.key, f"mindspeed_rl.{problem.key}"))


def _upstream_keys(start: ClusterRun) -> Iterator[Problem]:
    """Keys that MindSpeed-RL would refuse, and keys without effect, which it would not."""
    values = start.run.mindspeed_rl
    for problem in (*shipped_keys().problems(values), *ignored_keys(MindSpeedView(values))):
        found = problem._replace(key=f"mindspeed_rl.{problem.key}")
        elsewhere = written_as(problem.key, problem.value, values) if problem.code == "unknown-key" else []
        yield found._replace(fix=f"write {' and '.join(elsewhere)}") if elsewhere else found


def coca_section(values: Mapping[str, Any], **missing: Any) -> CocaSettings:
    """The section ``coca``, whose clip is MindSpeed-RL's if it has none; ``missing`` are other defaults.

    Raises ConfigError if it is wrong.
    """
    section = {**missing, **(values.get("coca") or {})}
    with contextlib.suppress(ValueError):  # an unknown form is refused below
        method = method_section(section.get("method") or {})
        if isinstance(method, Mapping):
            section["method"] = {"clip": MindSpeedView(values).value("rl_config.clip_ratio"), **method}
    return checked_section(CocaSettings, section)


def split_config(config: DictConfig) -> tuple[CocaSettings, DictConfig]:
    """The section ``coca``, checked, and MindSpeed-RL's configuration, whose values have the right types, without it.

    Raises ConfigError if the section is wrong, or a MindSpeed-RL key has a value that the hooks do not support.
    """
    theirs: Any = OmegaConf.to_container(config, resolve=True)
    settings = coca_section(theirs)
    theirs.pop("coca", None)
    hooks = HookConfig(theirs, settings)
    if not hooks.log_probs_of_samples:  # so they cannot be compared with training's
        hooks = replace(hooks, settings=settings.model_copy(update={"rollout_log_probs": False}))
    with open_dict(config):
        config.pop("coca", None)
    raise_problems(find_problems(hooks, HOOK_CHECKS))
    return hooks.settings, config
