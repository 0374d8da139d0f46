"""The columns that this project adds to MindSpeed-RL's transfer dock, named once.

A row is one response.  Rows are one-dimensional tensors; the dock turns int64 into int32.
"""

from collections.abc import Sequence

from coca_mindspeed.mindspeed.stages import columns

CONFIDENCE = "coca_confidence"  # float32 [1], NaN where the response is invalid
CONFIDENCE_LENGTH = "coca_confidence_length"  # int32 [1], tokens up to the end of the stated confidence
GRADABLE = "coca_gradable"  # int32 [1], 0 where the answer could not be graded
ROLLOUT_LOG_PROBS = "coca_rollout_log_probs"  # float32 [response tokens]
RECORD = "coca_record"  # int32 [1], index of the question's record; comes with the prompts, from the data set

#: Columns that the reward stage writes.
REWARD_COLUMNS = (CONFIDENCE, CONFIDENCE_LENGTH, GRADABLE)


def is_record_file(path: str) -> bool:
    """Whether ``megatron_training.data_path`` names records, which bring the column, and not a data set's prefix."""
    return path.endswith(".jsonl")


def training_columns(asked: Sequence[str], *, reference: bool, rollout_log_probs: bool) -> list[str]:
    """What MindSpeed-RL asks for, with ours added, and the reference's left out where there is none."""
    wanted = [column for column in asked if reference or column != "ref_log_prob"]
    wanted.append(columns.CONFIDENCE_LENGTH)
    return [*wanted, columns.ROLLOUT_LOG_PROBS] if rollout_log_probs else wanted
