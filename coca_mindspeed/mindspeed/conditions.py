"""What a MindSpeed-RL configuration must be like for the hooks to work; checked before anything starts."""

from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig

from coca_mindspeed.errors import ConfigError
from coca_mindspeed.mindspeed import columns
from coca_mindspeed.mindspeed.dataset import is_record_file
from coca_mindspeed.mindspeed.settings import CocaSettings
from coca_mindspeed.mindspeed.verifiers import check_names


def check_mindspeed_keys(config: DictConfig, settings: CocaSettings) -> None:
    """Refuse what MindSpeed-RL's keys ask for and the hooks do not support.

    Args:
        config: MindSpeed-RL's, without the section ``coca``.
        settings: the section ``coca``.

    Raises:
        ConfigError: with key, what was found and what was expected.
    """
    rl, training, generate = (
        dict(config.get(name) or {}) for name in ("rl_config", "megatron_training", "generate_config")
    )
    _check_what_the_hooks_need(config, settings, rl, training)
    check_names(list(rl.get("verifier_function") or []))
    group = int(rl.get("n_samples_per_prompt", 1))
    if group < 2:
        raise ConfigError(f"rl_config.n_samples_per_prompt: a group has at least 2 responses, found {group}")
    for key in ("reward_dispatch_size", "adv_dispatch_size"):
        if (size := rl.get(key)) and int(size) % group:
            nearest = max(group, int(size) // group * group)
            raise ConfigError(
                f"rl_config.{key}: {size} does not hold whole groups of {group}; the nearest is {nearest}"
            )
    if rl.get("async_engine") and settings.rollout_log_probs:
        raise ConfigError("coca.rollout_log_probs: not available with rl_config.async_engine; set it to false")
    if not (config.get("actor_config") or {}).get("save"):
        raise ConfigError("actor_config.save: MindSpeed-RL always saves after the last iteration; say where to")
    _check_workers(config, rl)
    if settings.platform == "host":
        _check_host_keys(config, settings, rl, generate)


def _check_workers(config: DictConfig, rl: dict[str, Any]) -> None:
    """The sections that MindSpeed-RL reads in separate-worker mode, and refuses in integrated mode."""
    sections = ("ref_config", "reward_config")
    if rl.get("use_integrated_worker", True):
        if extra := [name for name in sections if name in config]:
            raise ConfigError(f"{extra[0]}: rl_config.use_integrated_worker: true takes no such section, found one")
        return
    for name in sections:
        if not config.get(name):
            raise ConfigError(
                f"{name}: rl_config.use_integrated_worker: false needs this section, as actor_config (MindSpeed-RL "
                "reads it whether or not there is such a model), found none"
            )
    if not rl.get("reference_resource"):
        raise ConfigError(
            "rl_config.reference_resource: rl_config.use_integrated_worker: false needs it (MindSpeed-RL reads it "
            "whether or not there is a reference), found none"
        )


def _check_what_the_hooks_need(
    config: DictConfig, settings: CocaSettings, rl: dict[str, Any], training: dict[str, Any]
) -> None:
    """The conditions of docs/port.md, which the hooks would otherwise find broken when the cluster is up."""
    actor = dict(config.get("actor_config") or {})

    def value_of(key: str, default: Any = None) -> tuple[str, Any]:  # MindSpeed-RL lets actor_config win
        section = "actor_config" if key in actor else "megatron_training"
        return f"{section}.{key}", {**training, **actor}.get(key, default)

    key, stage = value_of("stage")
    if stage != "ray_grpo":
        raise ConfigError(f"{key}: expected ray_grpo, found {stage!r}")
    if entropy := float(rl.get("entropy_coeff") or 0.0):
        raise ConfigError(f"rl_config.entropy_coeff: the objective has no entropy term: expected 0, found {entropy}")
    if (splits := int(rl.get("partial_rollout_max_split") or 1)) > 1:
        raise ConfigError(f"rl_config.partial_rollout_max_split: groups must be whole: expected 1, found {splits}")
    strategy = str(rl.get("data_strategy") or "td")
    if strategy.strip().lower() not in ("td", "dock", "transfer_dock"):
        raise ConfigError(f"rl_config.data_strategy: the hooks know the transfer dock: expected td, found {strategy!r}")
    if not rl.get("rule_reward", True):
        raise ConfigError(
            "rl_config.rule_reward: the rule reward's worker also reads the confidences: expected true, found false"
        )
    _check_columns(settings, value_of("data_path")[1], *value_of("dataset_additional_keys", []))


def _check_columns(settings: CocaSettings, data_path: Any, key: str, found: Any) -> None:
    names = list(found or [])
    if isinstance(data_path, str):
        wanted, other = (columns.RECORD, None) if is_record_file(data_path) else ("labels", columns.RECORD)
        if wanted not in names or other in names:
            raise ConfigError(f"{key}: {data_path} has the column {wanted}: expected [{wanted}], found {names}")
    if settings.eval_interval and columns.RECORD not in names:
        raise ConfigError(
            f"coca.eval_interval={settings.eval_interval}: validation needs {columns.RECORD} among {key}, "
            f"found {names}; without it, expected 0"
        )


def _check_host_keys(config: DictConfig, settings: CocaSettings, rl: dict[str, Any], generate: dict[str, Any]) -> None:
    for key in ("offload_train_optimizer", "offload_train_grad", "offload_train_param"):
        if generate.get(key):
            raise ConfigError(f"generate_config.{key}: the host platform has nowhere to offload to; set it to false")
    paths = [
        (config.get("actor_config") or {}).get("load"),
        (rl.get("integrated_mode_config") or {}).get("ref_model_load_path"),
        (config.get("ref_config") or {}).get("load"),
    ]
    if settings.host.initial_weights is not None and needs_reference(config) and not any(paths):
        raise ConfigError(
            "coca.host.initial_weights: only the actor's; with rl_config.init_kl_coef above 0 the reference needs "
            "Megatron weights: set actor_config.load instead"
        )


def needs_reference(config: Mapping[str, Any]) -> bool:
    """Whether a KL term, and so a reference model, is asked for; MindSpeed-RL's default is one."""
    return float((config.get("rl_config") or {}).get("init_kl_coef", 0.01)) > 0
