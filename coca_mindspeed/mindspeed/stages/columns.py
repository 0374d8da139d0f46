"""Columns that this project adds to MindSpeed-RL's transfer dock.

A row is one response, a one-dimensional tensor; the dock turns int64 into int32.
"""

from collections.abc import Sequence

STATED = "coca_stated_confidence"  # float32 [confidences], NaN where the response states no valid one
CONFIDENCE_LENGTH = "coca_confidence_length"  # int32 [1], tokens up to the end of the stated confidence
SEGMENT_ENDS = "coca_segment_ends"  # int32 [segments], tokens up to the end of each segment
CORRECT = "coca_correct"  # float32 [1], 1 or 0; NaN where ungradable, where MindSpeed-RL's rm_scores is 0
ROLLOUT_LOG_PROBS = "coca_rollout_log_probs"  # float32 [response tokens]
RECORD = "coca_record"  # int32 [1], index of the question's record; comes with the prompts

#: Columns that the reward stage writes.
REWARD_COLUMNS = (STATED, CONFIDENCE_LENGTH, SEGMENT_ENDS, CORRECT)


def training_columns(asked: Sequence[str], *, reference: bool, rollout_log_probs: bool) -> list[str]:
    """Add our columns to the columns of MindSpeed-RL's update, and remove the reference's if there is none."""
    wanted = [column for column in asked if reference or column != "ref_log_prob"]
    return [*wanted, SEGMENT_ENDS, *([ROLLOUT_LOG_PROBS] if rollout_log_probs else [])]
