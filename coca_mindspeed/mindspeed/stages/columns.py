"""The columns that this project adds to MindSpeed-RL's transfer dock, named once.

A row is one response.  Rows are one-dimensional tensors; the dock turns int64 into int32.
"""

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
