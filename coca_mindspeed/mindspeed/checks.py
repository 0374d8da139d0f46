"""Checks of a cluster run before it starts: its requirements, its layout, its model, and keys that are set twice.

Other conditions are left to MindSpeed-RL's ``validate_rl_args``, which refuses a run when the driver starts.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

from coca_mindspeed.config.checks import CHECKS, same_data
from coca_mindspeed.config.requirements import required
from coca_mindspeed.config.schema import RunConfig
from coca_mindspeed.errors import Check, ConfigError, Problem, find_problems, problems_of, raise_problems
from coca_mindspeed.mindspeed.keys import RENAMES, NativeRun, set_twice, translate, written_as
from coca_mindspeed.mindspeed.layout import layout_problems
from coca_mindspeed.mindspeed.model_config import compare_model
from coca_mindspeed.mindspeed.requirements import HOOK_CHECKS, IGNORED, HookConfig, MindSpeedView, run_requirements
from coca_mindspeed.mindspeed.resolved_config import KEYS, ResolvedConfig
from coca_mindspeed.mindspeed.start.process import CocaSettings
from coca_mindspeed.mindspeed.upstream_keys import shipped_keys
from coca_mindspeed.scoring.settings import checked_section, method_section

#: Problems of MindSpeed-RL's keys without effect.
ignored_keys = required(IGNORED)


def run_problems(
    run: RunConfig, resolved: ResolvedConfig, iterations: int | None, file_values: Callable[[], dict[str, Any]]
) -> list[Problem]:
    """Find all problems of a cluster run.

    ``iterations`` is the length of a stage (None: unknown), ``file_values`` makes the configuration that the driver
    reads.
    """
    own = not isinstance(run, NativeRun)
    checks: tuple[Check[RunConfig], ...] = (
        *CHECKS,
        same_data,
        required(run_requirements(iterations)),
        lambda run: compare_model(run.model.path, translate(run)).problems,
        *([set_twice, lambda run: _npus(run, resolved)] if own else []),
        lambda run: _layout(run, resolved),
        lambda run: _driver(run, file_values()),
        *([_upstream_keys] if own else []),
    )
    return find_problems(run, checks)


def _layout(run: RunConfig, resolved: ResolvedConfig) -> Iterator[Problem]:
    """Problems of the layout, under configuration keys."""
    for problem in layout_problems(resolved):
        ours = problem.key == "mini_batch" and not isinstance(run, NativeRun)
        value = run.trainer.minibatches if ours else problem.value
        yield problem._replace(key=KEYS[problem.key], value=value)


def _npus(run: RunConfig, resolved: ResolvedConfig) -> Iterator[Problem]:
    hardware, others = run.hardware, other_npus(run.mindspeed_rl)
    expected = hardware.nodes * hardware.npus_per_node - sum(others.values())
    if resolved.npus != expected:
        reason = "".join(f", {npus} of them for rl_config.{key}" for key, npus in others.items())
        reason = f"hardware has {hardware.nodes} x {hardware.npus_per_node} NPUs{reason}"
        fix = f"set it to {expected}" if expected > 0 else ""
        yield Problem("hardware-npus", KEYS["npus"], resolved.npus, reason, fix)


def other_npus(values: dict[str, Any]) -> dict[str, int]:
    """Key -> NPUs that MindSpeed-RL reserves besides the actor's if its workers are separate."""
    rl = values.get("rl_config", {})
    if MindSpeedView(values).integrated:
        return {}
    groups = ["reference_resource"] * MindSpeedView(values).reference + ["reward_resource"]
    npus = {key: (rl.get(key) or {}).get("num_npus") for key in groups}
    return {key: int(count) for key, count in npus.items() if count}


def _driver(run: RunConfig, values: dict[str, Any]) -> Iterator[Problem]:
    """Problems that the driver would find in its configuration, by the keys that set them."""
    try:
        split_config(OmegaConf.create(values))
    except ConfigError as error:
        for problem in problems_of(error, "mindspeed-rl", "coca"):
            if isinstance(run, NativeRun):
                yield problem
                continue
            if problem.code != "hook-warmup" or not run.optimizer.warmup_steps:  # else found in our own section
                yield problem._replace(key=RENAMES.get(problem.key, f"mindspeed_rl.{problem.key}"))


def _upstream_keys(run: RunConfig) -> Iterator[Problem]:
    """Keys that MindSpeed-RL would refuse, and keys without effect, which it would not."""
    values = run.mindspeed_rl
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
