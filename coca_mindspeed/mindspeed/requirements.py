"""Requirements on a run on MindSpeed-RL: values of its own keys that the method needs, keys without effect, our keys.

Comments name the upstream function that fails late, or silently does something else.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any, ClassVar

from coca_mindspeed.config.requirements import Requirement, View, constant_rows, is_number, required
from coca_mindspeed.config.schema import RunConfig, Section
from coca_mindspeed.config.values import unread_keys
from coca_mindspeed.data.registry import conversion_command
from coca_mindspeed.errors import Check, Problem, show_value
from coca_mindspeed.mindspeed.keys import actor_sections, leaves
from coca_mindspeed.mindspeed.stages.dataset import RECORD
from coca_mindspeed.mindspeed.start.process import CocaSettings
from coca_mindspeed.mindspeed.upstream_keys import MINDSPEED_VERIFIERS, NESTED, OWN_VERIFIER, shipped_keys
from coca_mindspeed.utils.text_formats import read_yaml, value_of

_ABSENT = object()
_SAMPLING = "generate_config.sampling_config"
_CLIP, _GROUP = "rl_config.clip_ratio", "rl_config.n_samples_per_prompt"
_RULE_REWARD = "rl_config.rule_reward"
_DATA, _COLUMNS = "megatron_training.data_path", "megatron_training.dataset_additional_keys"


@dataclass(frozen=True)
class MindSpeedView(View):
    """MindSpeed-RL's configuration without the section ``coca``.

    ``megatron_training`` stands for the actor's three sections.
    """

    DEFAULTS: ClassVar[Mapping[str, Any]] = {
        f"{section}.{name}": key.default
        for section, keys in shipped_keys().sections.items()
        for name, key in keys.items()
        if section not in NESTED  # a mapping takes the place of the default's
    }

    def place(self, key: str) -> str:
        """The section whose value wins, with dashes if it is written so."""
        section, _, name = key.rpartition(".")
        sections = actor_sections(self.values)[::-1] if section == "megatron_training" else (section,)
        places = (f"{each}.{spelled}" for each in sections for spelled in (name, name.replace("_", "-")))
        return next((place for place in places if value_of(self.values, place, _ABSENT) is not _ABSENT), key)

    @property
    def reference(self) -> bool:
        """Whether a KL term, and so a reference model, is configured; MindSpeed-RL's default is one."""
        return float(self.value("rl_config.init_kl_coef")) > 0

    @property
    def integrated(self) -> bool:
        """Whether actor, reference and rollout share their NPUs."""
        return bool(value_of(self.values, "rl_config.use_integrated_worker", True))

    @property
    def packs(self) -> bool:
        """Whether microbatches hold responses one behind the other."""
        return bool(self.value("rl_config.use_remove_padding"))

    @property
    def recomputes(self) -> bool:
        """Whether whole layers are recomputed."""
        return bool(self.value("megatron_training.recompute_granularity") == "full")

    @property
    def verifiers(self) -> list[str]:
        return list(self.value("rl_config.verifier_function") or ())


@dataclass(frozen=True)
class HookConfig(MindSpeedView):
    """MindSpeed-RL's configuration without the section ``coca``, and that section."""

    settings: CocaSettings

    def value(self, key: str) -> Any:
        section, _, name = key.partition(".")
        return attrgetter(name)(self.settings) if section == "coca" else super().value(key)

    @property
    def group(self) -> int:
        return int(self.value(_GROUP))

    def whole_groups(self, size: int) -> bool:
        """Whether dispatches of ``size`` responses hold whole groups and make up an iteration."""
        prompts = self.value("megatron_training.global_batch_size") or 0
        return size % self.group == prompts * self.group % size == 0

    @property
    def log_probs_of_samples(self) -> bool:
        """Whether the rollout's log-probs are of the distribution that it samples from.

        vLLM returns log-probs before the temperature is applied.
        """
        return self.settings.rollout_engine != "vllm" or self.value(f"{_SAMPLING}.temperature") == 1.0

    @property
    def reads_log_probs(self) -> bool:
        return self.settings.method.reads_log_probs

    @property
    def on_one_npu(self) -> bool:
        return bool(value_of(self.values, "rl_config.actor_resource.num_npus") == 1)


Hook = Requirement[HookConfig]
Upstream = Requirement[MindSpeedView]


def _off(code: str, key: str, because: str, when: Callable[[HookConfig], object] = lambda c: True) -> Hook:
    return Hook(code, key, lambda value, _: not value, because, when=when)


def _grpo(code: str, key: str, *values: Any) -> Hook:
    """A key that chooses another algorithm with other values than MindSpeed-RL's GRPO has."""
    because = f"must be absent or {' or '.join(map(show_value, values))}: another value asks for another algorithm"
    return Hook(code, key, lambda value, _: value is None or value in values, because)


def lora(c: HookConfig) -> Iterator[Problem]:
    """LoRA's keys, wherever they stand."""
    for key, value in leaves(c.values):
        if key.rpartition(".")[2].replace("-", "_").startswith("lora_") and value is not None:
            reason = "must be absent: LoRA of MindSpeed-RL is neither hooked nor planned"
            fix = "train all weights, or use the local engine (model.lora.rank)"
            yield Problem("lora", key, value, reason, fix)


def _from_0_below_1(value: Any, _: object) -> bool:
    return isinstance(value or 0, int | float) and 0 <= (value or 0) < 1


def _up_to_the_rate(least: Any, c: HookConfig) -> bool:
    rate = c.value("megatron_training.lr")
    return isinstance(least or 0, int | float) and 0 <= (least or 0) <= (rate if is_number(rate) else math.inf)


def _gradable(_: Any, c: HookConfig) -> bool:
    """MindSpeed-RL's ``rule_verifier`` scores 0 for a name that it does not know."""
    names = c.verifiers
    return names == [OWN_VERIFIER] or (bool(names) and set(names) <= set(MINDSPEED_VERIFIERS))


def _how_to_convert(c: HookConfig) -> str:
    if (file := Path(str(c.value(_DATA)))).is_file():
        return f"convert it: {conversion_command(file)}"
    return "coca-mindspeed data prepare writes records (packed data sets are not read)"


_CONDITIONS: dict[str, Callable[[MindSpeedView], object]] = {
    "without a reference model": lambda c: not c.reference,
    "with this project's grader": lambda c: OWN_VERIFIER in c.verifiers,
    "with packed responses": lambda c: c.packs,
    "with packed responses and pipeline stages": lambda c: (
        c.packs and c.value("megatron_training.pipeline_model_parallel_size") != 1
    ),
    "with recomputed layers": lambda c: c.recomputes,
    "without recomputed layers": lambda c: not c.recomputes,
}
_CONSTANTS = tuple(constant_rows(read_yaml(Path(__file__).with_name("required_values.yaml")), _CONDITIONS))
_BONUS = "with coca.method.entropy_bonus, which reads the rollout's log-probs"
#: Values that the hooks do not support.
HOOKS: tuple[Hook, ...] = (
    *(row for row in _CONSTANTS if row.effect == "read"),
    Hook(
        "missing-key",
        f"{_SAMPLING}.temperature",
        lambda value, _: is_number(value),
        "must be a number: MindSpeed-RL has no default",
    ),
    Hook("hook-stage", "megatron_training.stage", ("ray_grpo",), "the hooks are GRPO's"),
    Hook(
        "hook-data-strategy",
        "rl_config.data_strategy",
        lambda value, _: str(value or "td").strip().lower() in ("td", "dock", "transfer_dock"),
        "must be td: the hooks use the transfer dock",
    ),
    Hook(
        "hook-clip",
        _CLIP,
        lambda clip, c: clip == c.settings.method.clip,
        lambda c: f"must equal coca.method.clip {c.settings.method.clip}",
    ),
    Hook(
        "hook-rule-reward",
        _RULE_REWARD,
        lambda value, c: value or not c.sets(_RULE_REWARD),
        "must be true: it reads confidences",
    ),
    _off(
        "hook-filter-groups-enable",
        "rl_config.filter_groups_enable",
        "must be false: its rollout would not use the newest weights",
    ),
    # BaseTrainingEngine._forward_backward_batch also shuffles its forward passes, whose results come back in the order
    # of the batch; and every pipeline stage shuffles by a seed of its own.
    _off(
        "hook-shuffle-mini-batch",
        "rl_config.shuffle_mini_batch",
        "must be false: it would also shuffle the old log-probabilities",
    ),
    _off("hook-multi-turn-enable", "rl_config.multi_turn_enable", "must be false: a response is one turn"),
    _off("hook-entropy-coeff", "rl_config.entropy_coeff", "must be 0: the objective has no entropy term"),
    _grpo("hook-algorithm", "rl_config.adv_estimator", "group_norm"),
    _grpo("hook-algorithm", "rl_config.gamma", 1.0),
    _grpo("hook-algorithm", "rl_config.kl_penalty", "low_var_kl", "kl", "abs", "mse"),
    _grpo("hook-algorithm", "rl_config.use_kl_in_reward", False),
    _grpo("hook-algorithm", "rl_config.clip_higher_enable", False),
    _grpo("hook-algorithm", "rl_config.overlong_buffer_enable", False),
    Hook("hook-save", "actor_config.save", lambda path, _: path, "must name a directory: the last iteration is saved"),
    # OptimizerParamScheduler asserts these two in the workers, without a message.
    Hook(
        "hook-warmup",
        "megatron_training.lr_warmup_fraction",
        _from_0_below_1,
        "must be from 0 and below 1: it must end before the run",
    ),
    Hook(
        "hook-min-lr",
        "megatron_training.min_lr",
        _up_to_the_rate,
        lambda c: f"must be from 0 to the learning rate {c.value('megatron_training.lr')}",
    ),
    Hook("whole-groups", "rl_config.partial_rollout_max_split", lambda n, _: n <= 1, "must be 1: whole groups"),
    # The first rollout would end with "vllm dp groups is None".
    _off(
        "hook-guarantee-order",
        "rl_config.guarantee_order",
        "must be false on a single NPU: MindSpeed-RL makes no groups of rollout ranks",
        when=lambda c: c.on_one_npu and c.settings.rollout_engine == "vllm",
    ),
    # Advantages are computed before the old log-probs, so the bonus is made of the rollout's.
    _off("entropy-bonus", "rl_config.async_engine", f"must be false {_BONUS}", lambda c: c.reads_log_probs),
    Hook(
        "entropy-bonus",
        f"{_SAMPLING}.temperature",
        lambda _, c: c.log_probs_of_samples or not c.reads_log_probs,
        f"must be 1.0 {_BONUS}",  # vLLM returns them before the temperature is applied
    ),
    Hook(
        "entropy-bonus",
        "coca.rollout_log_probs",
        lambda kept, c: kept or not (c.reads_log_probs and c.log_probs_of_samples),
        f"must be true {_BONUS}",
    ),
    Hook(
        "entropy-bonus",
        f"{_SAMPLING}.logprobs",
        lambda value, c: value is not None or not c.sets(f"{_SAMPLING}.logprobs"),
        f"must be 1 {_BONUS}",
        when=lambda c: c.reads_log_probs and c.settings.rollout_engine == "vllm",
    ),
    Hook(
        "hook-async-engine",
        "coca.rollout_log_probs",
        lambda kept, c: not kept or c.reads_log_probs or not c.value("rl_config.async_engine"),
        "must be false with rl_config.async_engine",
    ),
    Hook(
        "rollout-weights",
        "coca.rollout_is_threshold",
        lambda weight, c: weight is None or c.settings.rollout_log_probs,
        "must be null without coca.rollout_log_probs; vLLM also needs the temperature 1",
    ),
    Hook("group-size", _GROUP, lambda _, c: c.group >= 2, "must be at least 2"),
    *(
        Hook(
            "dispatch-groups",
            f"rl_config.{name}",
            lambda size, c: not size or c.group < 2 or c.whole_groups(int(size)),
            "must hold whole groups, and divide the responses of an iteration",
        )
        for name in ("reward_dispatch_size", "adv_dispatch_size")
    ),
    *(
        Hook(
            "separate-worker",
            key,
            lambda content, c: c.integrated or content,
            "must be present with rl_config.use_integrated_worker: false",
        )
        for key in ("ref_config", "reward_config", "rl_config.reference_resource")
    ),
    Hook(
        "record-file",
        _DATA,
        lambda path, _: path is None or str(path).endswith(".jsonl"),
        "must end in .jsonl",
        _how_to_convert,
    ),
    Hook(
        "data-columns",
        _COLUMNS,
        lambda names, c: c.value(_DATA) is None or RECORD in list(names or ()),
        f"must be [{RECORD}]",
    ),
    Hook(
        "verifiers",
        "rl_config.verifier_function",
        _gradable,
        f"must be [{OWN_VERIFIER}], or verifiers of MindSpeed-RL: {', '.join(MINDSPEED_VERIFIERS)}",
    ),
)
#: Check of the values that the hooks support.
HOOK_CHECKS: tuple[Check[HookConfig], ...] = (required(HOOKS), lora)


#: Keys that have no effect.
IGNORED: tuple[Upstream, ...] = tuple(row for row in _CONSTANTS if row.effect == "none")

Run = Requirement[RunConfig]


def _local_only() -> Iterator[Run]:
    for key, instead in unread_keys(RunConfig, "mindspeed_rl").items():
        section, _, name = key.partition(".")
        if name:
            default = attrgetter(name)(RunConfig.model_fields[section].default)
            unset = partial(lambda default, value, _: isinstance(value, Section) or value == default, default)
            yield Run("local-only", key, unset, f"must be {show_value(default)} on a cluster", instead)


def run_requirements(iterations: int | None) -> tuple[Run, ...]:
    """Values of our keys that MindSpeed-RL cannot have; ``iterations`` is the length of a stage, None if unknown."""
    return (
        Run("built-in-model", "model.path", lambda path, _: path is not None, "must name a directory on a cluster"),
        Run(
            "no-weights",
            "model.megatron_path",
            lambda path, run: run.hardware.platform == "host" or path is not None,
            "must name Megatron weights: Megatron would start from random ones",
            "convert them: launch/convert_weights.sh hf2mcore",
        ),
        Run("records-only", "data.name", ("records",), "a cluster trains on records"),
        Run(
            "warmup-updates",
            "optimizer.warmup_steps",
            lambda steps, run: not steps or run.trainer.minibatches * run.trainer.ppo_epochs == 1,
            "must be 0 with several updates per step",
        ),
        Run(
            "warmup-length",
            "optimizer.warmup_steps",
            lambda steps, _: iterations is None or steps < iterations,
            f"must be below the {iterations} iterations of a stage",
        ),
        Run(
            "schedule-wsd", "optimizer.schedule", lambda name, _: name != "wsd", "must not be wsd: of the local engine"
        ),
        Run(
            "schedule-epochs",
            "optimizer.schedule",
            lambda name, run: name == "constant" or run.trainer.ppo_epochs == 1,
            lambda run: f"must be constant: Megatron would finish it after 1/{run.trainer.ppo_epochs} of the run",
        ),
        Run(
            "checkpoint-interval", "checkpoint.interval", lambda n, _: n >= 1, "must be at least 1: a divisor upstream"
        ),
        Run(
            "compute-dtype",
            "model.compute_dtype",
            ("bfloat16",),
            "Megatron trains in it",
            "on the CPU shim, set coca.host.dtype, which is below mindspeed_rl in a file of ours",
        ),
        *_local_only(),
    )
