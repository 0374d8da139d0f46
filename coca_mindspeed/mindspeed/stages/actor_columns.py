"""Which columns of the dock the actor's update reads."""

from collections.abc import Sequence

from coca_mindspeed.mindspeed.stages import columns


def training_columns(asked: Sequence[str], *, reference: bool, rollout_log_probs: bool) -> list[str]:
    """What MindSpeed-RL asks for, with ours added, and the reference's left out where there is none."""
    wanted = [column for column in asked if reference or column != "ref_log_prob"]
    wanted.append(columns.CONFIDENCE_LENGTH)
    return [*wanted, columns.ROLLOUT_LOG_PROBS] if rollout_log_probs else wanted
