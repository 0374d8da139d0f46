"""Requirements on slime and vime: a release with the hooks, and options that the method needs."""

import sys
from collections.abc import Mapping
from typing import Any

from coca_mindspeed.config.requirements import Requirement, View
from coca_mindspeed.errors import ConfigError
from coca_mindspeed.integrations.settings import (
    ADVANTAGES_ALONE,
    ALL_EQUAL,
    ONE_MASK,
    ONE_RATIO,
    ONE_WEIGHT,
    check_sources,
)

HOOKS = "coca_mindspeed.integrations.slime"
_POLICY = "the confidence states the success rate of the policy's own distribution"
_LOSS = "backends.megatron_utils.loss"
_TOKEN_WEIGHTS = tuple(
    f"{package}.{_LOSS}.{function}_function" for package in ("slime", "vime") for function in ("vanilla_tis", "icepop")
)


def _whole_groups(batch: Any, args: View) -> bool:
    rollout = args.value("rollout_batch_size"), args.value("n_samples_per_prompt")
    return bool(batch) and None not in rollout and rollout[0] * rollout[1] % batch == 0


#: Options by the names of their attributes; an absent one is None.
REQUIREMENTS: tuple[Requirement[View], ...] = (
    Requirement(
        "settings",
        "coca",
        lambda section, _: isinstance(section, Mapping),
        "must be a section of the YAML file that --custom-config-path names, such as coca: {method: {}}",
    ),
    Requirement(
        "hooks",
        "custom_reward_post_process_path",
        (f"{HOOKS}.give_credit",),
        "it gives the credit while the groups are whole",
    ),
    Requirement(
        "hooks",
        "custom_advantage_function_path",
        (f"{HOOKS}.token_advantages",),
        "another one gives every token of a response the same advantage",
    ),
    Requirement(
        "hooks",
        "custom_pg_loss_reducer_function_path",
        (f"{HOOKS}.sum_over_tokens",),
        "another reducer is not known to weigh the tokens of both segments alike",
        optional=True,
    ),
    Requirement(
        "hooks",
        "custom_convert_samples_to_train_data_path",
        (None,),
        "the one that it replaces calls give_credit",
    ),
    Requirement("hooks", "compute_advantages_and_returns", (True,), "slime calls token_advantages where it is set"),
    Requirement("hooks", "loss_type", ("policy_loss",), "other losses do not read advantages"),
    Requirement("estimator", "advantage_estimator", ("grpo", "cispo"), ONE_RATIO),
    Requirement("estimator", "normalize_advantages", (False,), ADVANTAGES_ALONE, optional=True),
    Requirement("estimator", "kl_coef", (0,), "it has no effect with our advantages: use --use-kl-loss", optional=True),
    Requirement("estimator", "use_opd", (False,), ADVANTAGES_ALONE, optional=True),
    Requirement("segments", "use_opsm", (False,), ONE_MASK, optional=True),
    Requirement("segments", "custom_tis_function_path", _TOKEN_WEIGHTS, ONE_WEIGHT, optional=True),
    Requirement("segments", "qkv_format", ("thd",), "the parts of a sequence are cut for this layout", optional=True),
    Requirement("segments", "use_score_centering", (False,), "the objective has no such term", optional=True),
    Requirement(
        "groups",
        "dynamic_sampling_filter_path",
        lambda path, _: "check_reward_nonzero_std" not in path,
        f"must be another filter: {ALL_EQUAL}",
        optional=True,
    ),
    Requirement(
        "segments",
        "mask_offpolicy_in_partial_rollout",
        (False,),
        "the confidence comes first, so it would be masked where the answer is long",
        optional=True,
    ),
    Requirement(
        "groups", "n_samples_per_prompt", lambda group, _: (group or 0) >= 2, "must be at least 2: GESR needs a group"
    ),
    Requirement(
        "groups",
        "global_batch_size",
        _whole_groups,
        "must divide rollout_batch_size * n_samples_per_prompt: the rest of a rollout would be dropped",
    ),
    Requirement("rewards", "reward_key", (None,), "rewards are numbers"),
    Requirement("sampling", "rollout_top_k", (-1,), _POLICY, optional=True),
    Requirement("sampling", "rollout_top_p", (1,), _POLICY, optional=True),
)


def package() -> str:
    """The package that has loaded the hooks: ``slime``, or one that was made from it."""
    return next((name for name in ("vime", "miles") if f"{name}.utils.misc" in sys.modules), "slime")


def check_package(args: Any) -> None:
    """Refuse a package without the hooks (ConfigError), and a slime of other sources than a manifest's (ManifestError).

    There is no manifest of vime.
    """
    if not hasattr(args, "custom_advantage_function_path"):
        raise ConfigError(
            f"{package()} has no --custom-advantage-function-path: slime before 0.3.0, what is made from it, and miles "
            "give all tokens of a response one advantage; take slime from 0.3.0, or vime"
        )
    if package() == "slime":
        check_sources("slime")
