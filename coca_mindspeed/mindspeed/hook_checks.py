"""Conditions of the hooks on MindSpeed-RL's keys (docs/port.md), checked before the cluster starts."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from omegaconf import DictConfig, OmegaConf

from coca_mindspeed.errors import Condition, as_check, find_problems, raise_problems, show_value
from coca_mindspeed.mindspeed.stages import columns
from coca_mindspeed.mindspeed.stages.verifiers import MINDSPEED_VERIFIERS, OWN_VERIFIER
from coca_mindspeed.mindspeed.start.settings import CocaSettings
from coca_mindspeed.mindspeed.upstream_keys import GRPO_VALUES
from coca_mindspeed.utils.text_formats import value_of

_DEFAULTS = {  # MindSpeed-RL's
    "clip_ratio": 0.2,
    "init_kl_coef": 0.01,
    "partial_rollout_max_split": 1,
    "n_samples_per_prompt": 1,
    "reward_dispatch_size": 0,
    "adv_dispatch_size": 0,
}


@dataclass(frozen=True)
class HookConfig:
    """MindSpeed-RL's configuration without the section ``coca``, and that section."""

    config: Mapping[str, Any]
    settings: CocaSettings

    def section(self, name: str) -> Mapping[str, Any]:
        return self.config.get(name) or {}

    def get(self, key: str) -> Any:
        """Value of a dotted key, or MindSpeed-RL's default."""
        section, _, name = key.partition(".")
        if section == "coca":
            return attrgetter(name)(self.settings)
        value = value_of(self.config, key)
        return _DEFAULTS.get(name) if value is None and section == "rl_config" else value

    def actor_key(self, name: str) -> str:
        """Full key of an actor's setting; MindSpeed-RL lets ``actor_config`` win over ``megatron_training``."""
        return f"{'actor_config' if name in self.section('actor_config') else 'megatron_training'}.{name}"


def _hooks(c: HookConfig) -> Iterator[Condition]:
    rl, clip = c.section("rl_config"), c.settings.method.clip
    key = c.actor_key("stage")
    yield "hook-stage", key, c.get(key) == "ray_grpo", "must be ray_grpo"
    strategy = str(rl.get("data_strategy") or "td").strip().lower()
    docked = strategy in ("td", "dock", "transfer_dock")
    yield "hook-data-strategy", "rl_config.data_strategy", docked, "must be td: the hooks use the transfer dock"
    key = "rl_config.clip_ratio"
    yield "hook-clip", key, c.get(key) == clip, f"must equal coca.method.clip {clip}"
    key = "coca.method.entropy_bonus"
    yield "entropy-bonus", key, not c.get(key), "must be 0: only the local engine has it"
    read = rl.get("rule_reward", True)
    yield "hook-rule-reward", "rl_config.rule_reward", read, "must be true: its worker also reads the confidences"
    # BaseTrainingEngine._forward_backward_batch also shuffles its forward passes, whose results come back in the order
    # of the batch; and every pipeline stage shuffles by a seed of its own.
    for name, reason in (
        ("filter_groups_enable", "must be false: its rollout would not use the newest weights"),
        ("shuffle_mini_batch", "must be false: it would also shuffle the old log-probabilities"),
        ("multi_turn_enable", "must be false: a response is one turn"),
        ("entropy_coeff", "must be 0: the objective has no entropy term"),
    ):
        yield f"hook-{name.replace('_', '-')}", f"rl_config.{name}", not rl.get(name), reason
    for name, values in GRPO_VALUES.items():
        accepted, shown = rl.get(name) in (None, *values), " or ".join(map(show_value, values))
        reason = f"must be absent or {shown}: another value asks for another algorithm"
        yield "hook-algorithm", f"rl_config.{name}", accepted, reason
    saves = "must name a directory: MindSpeed-RL always saves after the last iteration"
    yield "hook-save", "actor_config.save", c.get("actor_config.save"), saves
    key = "rl_config.partial_rollout_max_split"
    yield "whole-groups", key, c.get(key) <= 1, "must be 1: whole groups"
    # The first rollout would end with "vllm dp groups is None".
    single = (rl.get("actor_resource") or {}).get("num_npus") == 1 and c.settings.rollout_engine == "vllm"
    reason = "must be false on a single NPU: MindSpeed-RL makes no groups of rollout ranks"
    yield "hook-guarantee-order", "rl_config.guarantee_order", not (rl.get("guarantee_order") and single), reason
    measured = not (rl.get("async_engine") and c.settings.rollout_log_probs)
    yield "hook-async-engine", "coca.rollout_log_probs", measured, "must be false with rl_config.async_engine"
    key, weighs = "coca.rollout_is_threshold", c.settings.rollout_is_threshold is not None
    reason = "must be null without coca.rollout_log_probs; vLLM also needs the temperature 1"
    yield "rollout-weights", key, c.settings.rollout_log_probs or not weighs, reason


def _groups(c: HookConfig) -> Iterator[Condition]:
    group = int(c.get("rl_config.n_samples_per_prompt"))
    yield "group-size", "rl_config.n_samples_per_prompt", group >= 2, "must be at least 2"
    for key in ("rl_config.reward_dispatch_size", "rl_config.adv_dispatch_size"):
        whole = group < 2 or int(c.get(key)) % group == 0
        yield "dispatch-groups", key, whole, f"must hold whole groups of {group}"


def _workers(c: HookConfig) -> Iterator[Condition]:
    """MindSpeed-RL reads these sections in separate-worker mode, with or without such a model."""
    if not c.section("rl_config").get("use_integrated_worker", True):
        for key in ("ref_config", "reward_config", "rl_config.reference_resource"):
            reason = "must be present with rl_config.use_integrated_worker: false, with or without such a model"
            yield "separate-worker", key, c.get(key), reason


def _columns(c: HookConfig) -> Iterator[Condition]:
    path, key = c.actor_key("data_path"), c.actor_key("dataset_additional_keys")
    if c.get(path) is not None:
        fix = "data.train=FILE; coca-mindspeed data prepare writes records (packed data sets are not read)"
        yield "record-file", path, str(c.get(path)).endswith(".jsonl"), "must be a file of records (.jsonl)", fix
        yield "data-columns", key, columns.RECORD in list(c.get(key) or []), f"must be [{columns.RECORD}]"


def _verifiers(c: HookConfig) -> Iterator[Condition]:
    """MindSpeed-RL's ``rule_verifier`` scores 0 for a name that it does not know."""
    names = list(c.get("rl_config.verifier_function") or [])
    known = names == [OWN_VERIFIER] or (names and set(names) <= set(MINDSPEED_VERIFIERS))
    expected = f"must be [{OWN_VERIFIER}], or verifiers of MindSpeed-RL: {', '.join(MINDSPEED_VERIFIERS)}"
    yield "verifiers", "rl_config.verifier_function", known, expected


_CONDITIONS = (_hooks, _groups, _workers, _columns, _verifiers)


def check_mindspeed_keys(config: DictConfig, settings: CocaSettings) -> None:
    """Raise ``ConfigError`` with all values of MindSpeed-RL's keys that the hooks do not support.

    ``config`` is MindSpeed-RL's without the section ``coca``, with values of the right types; ``settings`` is that
    section.
    """
    plain = OmegaConf.to_container(config, resolve=True)
    assert isinstance(plain, dict)
    subject = HookConfig({str(key): value for key, value in plain.items()}, settings)
    raise_problems(find_problems(subject, [as_check(conditions, HookConfig.get) for conditions in _CONDITIONS]))


def needs_reference(config: Mapping[str, Any]) -> bool:
    """Whether a KL term, and so a reference model, is configured; MindSpeed-RL's default is one."""
    value = (config.get("rl_config") or {}).get("init_kl_coef")
    return float(_DEFAULTS["init_kl_coef"] if value is None else value) > 0
