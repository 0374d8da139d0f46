"""Requirements on slime and vime: a release with the hooks, and options that the method needs."""

import sys
from collections.abc import Mapping
from typing import Any

from coca_mindspeed.config.requirements import Requirement, View
from coca_mindspeed.errors import ConfigError
from coca_mindspeed.integrations.settings import ALL_EQUAL, check_sources, option_rows


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
    *option_rows("slime"),
    Requirement(
        "groups",
        "dynamic_sampling_filter_path",
        lambda path, _: "check_reward_nonzero_std" not in path,
        f"must be another filter: {ALL_EQUAL}",
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
