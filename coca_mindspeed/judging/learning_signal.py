"""Whether a training has anything to learn from: a group whose rewards are all equal has no gradient."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

NO_SIGNAL_STEPS = 5  # consecutive steps; one of them may be bad luck
_NEARLY_ALL = 0.95
_MOST = 0.5


def learning_problems(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """What stands in the way of learning, by the metrics of some consecutive steps; empty where nothing does.

    Args:
        rows: metrics by the names of metrics.jsonl; what a row lacks is not judged.
    """
    invalid = _mean(rows, "rollout/invalid_share")
    cut_off = _mean(rows, "response/cut_off_share")
    flat = [_mean(rows, name) for name in ("group/no_confidence_variance_share", "group/no_answer_variance_share")]
    problems = []
    if invalid > _MOST:
        problems.append(f"{invalid:.0%} of the responses state no valid confidence")
    if min(flat) >= _NEARLY_ALL:
        problems.append(
            f"nothing to learn: in {flat[0]:.0%} of the groups all confidence rewards are equal, in {flat[1]:.0%} all "
            "answer rewards, so their advantages are 0"
        )
    if cut_off > _MOST:
        problems.append(f"{cut_off:.0%} of the responses are cut off at rollout.max_new_tokens")
    return problems


def _mean(rows: Sequence[Mapping[str, Any]], name: str) -> float:
    """The mean of a metric over the rows that have it; NaN, which is neither above nor below anything, if none has."""
    values = [float(row[name]) for row in rows if row.get(name) is not None]
    return sum(values) / len(values) if values else math.nan
