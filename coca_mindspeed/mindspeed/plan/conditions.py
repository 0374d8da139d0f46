"""What a MindSpeed-RL configuration must be like for the hooks to work; checked before anything starts."""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from omegaconf import DictConfig

from coca_mindspeed.errors import ConfigError
from coca_mindspeed.mindspeed.stages import columns
from coca_mindspeed.mindspeed.stages.verifiers import check_names
from coca_mindspeed.mindspeed.start.settings import CocaSettings


def check_mindspeed_keys(config: DictConfig, settings: CocaSettings) -> None:
    """Refuse what MindSpeed-RL's keys ask for and the hooks do not support.

    Args:
        config: MindSpeed-RL's, without the section ``coca``.
        settings: the section ``coca``.

    Raises:
        ConfigError: one line for each problem, with key, what was found and what was expected.
    """
    problems: list[str] = []
    for condition in _CONDITIONS:
        try:
            problems += condition(config, settings)
        except ConfigError as error:  # a value of the wrong type
            problems.append(str(error))
    if problems:
        raise ConfigError("\n".join(problems))


def _section(config: DictConfig, name: str) -> dict[str, Any]:
    return dict(config.get(name) or {})


def _number(rl_config: Mapping[str, Any], key: str, default: float) -> float:
    value = rl_config.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ConfigError(f"rl_config.{key}: expected a finite number, found {value!r}")
    return value


def _what_the_hooks_need(config: DictConfig, settings: CocaSettings) -> Iterator[str]:
    """The conditions of docs/port.md, which the hooks would otherwise find broken when the cluster is up."""
    rl = _section(config, "rl_config")
    key, stage = _of_actor(config, "stage")
    if stage != "ray_grpo":
        yield f"{key}: expected ray_grpo, found {stage!r}"
    strategy = str(rl.get("data_strategy") or "td")
    if strategy.strip().lower() not in ("td", "dock", "transfer_dock"):
        yield f"rl_config.data_strategy: the hooks know the transfer dock: expected td, found {strategy!r}"
    clip = _number(rl, "clip_ratio", 0.2)
    if clip != settings.method.clip:
        yield (
            f"coca.method.clip {settings.method.clip} and rl_config.clip_ratio {clip} differ: expected the same, the "
            "epsilon of the clipped ratio"
        )
    if not rl.get("rule_reward", True):
        yield "rl_config.rule_reward: the rule reward's worker also reads the confidences: expected true, found false"
    if rl.get("filter_groups_enable"):
        yield (
            "rl_config.filter_groups_enable: in this stage the actor would roll out without the weights of its last "
            "update: expected false, found true"
        )
    if rl.get("shuffle_mini_batch"):
        # BaseTrainingEngine._forward_backward_batch shuffles in its forward passes too, whose results come back in the
        # order of the batch; and every pipeline stage shuffles by a seed of its own.
        yield (
            "rl_config.shuffle_mini_batch: MindSpeed-RL also shuffles where it computes the old log-probabilities, and "
            "gives each response those of another: expected false, found true"
        )
    if not (config.get("actor_config") or {}).get("save"):
        yield "actor_config.save: MindSpeed-RL always saves after the last iteration; say where to"


def _numbers(config: DictConfig, settings: CocaSettings) -> Iterator[str]:
    rl = _section(config, "rl_config")
    _number(rl, "init_kl_coef", 0.01)
    if entropy := _number(rl, "entropy_coeff", 0.0):
        yield f"rl_config.entropy_coeff: the objective has no entropy term: expected 0, found {entropy}"
    if (splits := _number(rl, "partial_rollout_max_split", 1)) > 1:
        yield f"rl_config.partial_rollout_max_split: groups must be whole: expected 1, found {splits}"
    group = int(_number(rl, "n_samples_per_prompt", 1))
    if group < 2:
        yield f"rl_config.n_samples_per_prompt: a group has at least 2 responses, found {group}"
        return
    for key in ("reward_dispatch_size", "adv_dispatch_size"):
        if (size := int(_number(rl, key, 0))) % group:
            nearest = max(group, size // group * group)
            yield f"rl_config.{key}: {size} does not hold whole groups of {group}; the nearest is {nearest}"
    npus = int((rl.get("actor_resource") or {}).get("num_npus") or 0)
    if rl.get("guarantee_order") and npus == 1 and settings.rollout_engine == "vllm":
        yield (
            "rl_config.guarantee_order: on a single NPU MindSpeed-RL makes no groups of rollout ranks, by which it "
            "would hand out rows in order, and its rollout ends with an error: expected false, found true"
        )
    if rl.get("multi_turn_enable"):
        yield "rl_config.multi_turn_enable: confidences of several turns are not supported: expected false, found true"
    if rl.get("async_engine") and settings.rollout_log_probs:
        yield "coca.rollout_log_probs: not available with rl_config.async_engine; set it to false"


def _verifiers(config: DictConfig, _settings: CocaSettings) -> Iterator[str]:
    check_names(list(_section(config, "rl_config").get("verifier_function") or []))
    yield from ()


def _workers(config: DictConfig, _settings: CocaSettings) -> Iterator[str]:
    """The sections that MindSpeed-RL reads in separate-worker mode, and refuses in integrated mode."""
    rl, sections = _section(config, "rl_config"), ("ref_config", "reward_config")
    if rl.get("use_integrated_worker", True):
        for name in sections:
            if name in config:
                yield f"{name}: rl_config.use_integrated_worker: true takes no such section, found one"
        return
    for name in sections:
        if not config.get(name):
            yield (
                f"{name}: rl_config.use_integrated_worker: false needs this section, as actor_config (MindSpeed-RL "
                "reads it whether or not there is such a model), found none"
            )
    if not rl.get("reference_resource"):
        yield (
            "rl_config.reference_resource: rl_config.use_integrated_worker: false needs it (MindSpeed-RL reads it "
            "whether or not there is a reference), found none"
        )


def _columns(config: DictConfig, settings: CocaSettings) -> Iterator[str]:
    data_path = _of_actor(config, "data_path")[1]
    key, found = _of_actor(config, "dataset_additional_keys", [])
    names = list(found or [])
    if isinstance(data_path, str):
        wanted, other = (columns.RECORD, None) if columns.is_record_file(data_path) else ("labels", columns.RECORD)
        if wanted not in names or other in names:
            yield f"{key}: {data_path} has the column {wanted}: expected [{wanted}], found {names}"
    if settings.eval_interval and columns.RECORD not in names:
        yield (
            f"coca.eval_interval={settings.eval_interval}: validation needs {columns.RECORD} among {key}, "
            f"found {names}; without it, expected 0"
        )


def _of_actor(config: DictConfig, key: str, default: Any = None) -> tuple[str, Any]:
    """Where a key of the actor's is from, and its value; MindSpeed-RL lets ``actor_config`` win."""
    actor = _section(config, "actor_config")
    section = "actor_config" if key in actor else "megatron_training"
    return f"{section}.{key}", {**_section(config, "megatron_training"), **actor}.get(key, default)


def _host(config: DictConfig, settings: CocaSettings) -> Iterator[str]:
    if settings.platform != "host":
        return
    rl, generate = _section(config, "rl_config"), _section(config, "generate_config")
    for key in ("offload_train_optimizer", "offload_train_grad", "offload_train_param"):
        if generate.get(key):
            yield f"generate_config.{key}: the host platform has nowhere to offload to; set it to false"
    for key in ("infer_tensor_parallel_size", "infer_pipeline_parallel_size", "infer_expert_parallel_size"):
        if settings.rollout_engine == "transformers" and (size := generate.get(key, 1)) != 1:
            yield (
                f"generate_config.{key}: without an NPU, transformers samples on one rank: expected 1, found {size} "
                "(coca.rollout: vllm may have more; docs/port.md)"
            )
    paths = [
        (config.get("actor_config") or {}).get("load"),
        (rl.get("integrated_mode_config") or {}).get("ref_model_load_path"),
        (config.get("ref_config") or {}).get("load"),
    ]
    if settings.host.initial_weights is not None and needs_reference(config) and not any(paths):
        yield (
            "coca.host.initial_weights: only the actor's; with rl_config.init_kl_coef above 0 the reference needs "
            "Megatron weights: set actor_config.load instead"
        )


def needs_reference(config: Mapping[str, Any]) -> bool:
    """Whether a KL term, and so a reference model, is asked for; MindSpeed-RL's default is one."""
    return _number(config.get("rl_config") or {}, "init_kl_coef", 0.01) > 0


_CONDITIONS: tuple[Callable[[DictConfig, CocaSettings], Iterator[str]], ...] = (
    _what_the_hooks_need,
    _numbers,
    _verifiers,
    _workers,
    _columns,
    _host,
)
