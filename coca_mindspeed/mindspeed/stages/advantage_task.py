"""The advantage task: a Ray task that gives the rows of an iteration in the dock their advantages."""

import time
from collections.abc import Sequence
from typing import Any

from coca_mindspeed.algorithm.credit import CreditRule
from coca_mindspeed.errors import TrainingError
from coca_mindspeed.mindspeed.stages.dock import (
    ROLLOUT_LOG_PROBS,
    SCORES,
    batches,
    check_groups,
    merged,
    put,
    report,
)
from coca_mindspeed.mindspeed.stages.metrics import as_ratios
from coca_mindspeed.mindspeed.start.process import CocaSettings
from coca_mindspeed.scoring.metrics import TIMES_ASKED, WeightedMean, rollout_metrics, sight_metrics
from coca_mindspeed.scoring.rollout import Scored, confidence_log_probs


def compute_advantages(
    dock: Any,
    settings: CocaSettings,
    *,
    count: int,
    group_size: int,
    rows: int,
    guarantee_order: bool,
    sample_prompts: int,
    seen: tuple[Sequence[bool], float] | None = None,
) -> list[dict[str, Any]]:
    """Take all scored rows of the iteration out of the dock and write ``advantages`` and ``returns``.

    ``count`` rows are taken and written at a time, of ``rows`` in the iteration, in order with ``guarantee_order``.
    ``seen``: whether an earlier iteration asked each question, and how often a question was asked on average so far.

    Returns:
        ``index`` and :meth:`.Credited.rows` of the responses to the first ``sample_prompts`` prompts.
    """
    if count % group_size:
        raise TrainingError(
            f"rl_config.adv_dispatch_size {count} does not hold whole groups of n_samples_per_prompt {group_size}"
        )
    assigned = [list(range(i, min(i + count, rows))) for i in range(0, rows, count)] if guarantee_order else None
    columns = [*SCORES.values(), *([ROLLOUT_LOG_PROBS] if settings.method.reads_log_probs else [])]
    portions = batches(
        dock, "compute_advantage", columns, count, assigned=assigned, stall_timeout=settings.stall_timeout
    )
    batch = merged(list(portions))  # method.advantage_scale=batch needs the whole step
    start = time.perf_counter()
    check_groups(batch.indexes, group_size)
    if len(batch.indexes) != rows:
        raise TrainingError(f"the advantage task got {len(batch.indexes)} rows of an iteration of {rows}")
    scored, rule = Scored.from_columns(batch.scores()), CreditRule(settings.method, settings.stage)
    # MindSpeed-RL's loop computes the old log-probs later; those of the rollout are of the same weights.
    sampled = batch.padded(ROLLOUT_LOG_PROBS) if ROLLOUT_LOG_PROBS in columns else None
    log_probs = confidence_log_probs(rule, sampled, scored.segment_ends)
    credited = scored.give_credit(rule, group_size, log_probs=log_probs)
    tokens = [row[:length] for row, length in zip(credited.token_advantages, scored.lengths.tolist(), strict=True)]
    for first in range(0, rows, count):
        part = slice(first, first + count)
        put(dock, {"advantages": tokens[part], "returns": tokens[part]}, batch.indexes[part])
    means = rollout_metrics(credited)
    if seen is not None:
        before, times = seen
        means |= sight_metrics(scored, [before[index // group_size] for index in batch.indexes[::group_size]])
        means[TIMES_ASKED] = WeightedMean(times, 1)
    measured = {**as_ratios(means), "seconds/advantage": time.perf_counter() - start}
    report(dock, {name: [value] for name, value in measured.items()})
    shown = [row for row, index in enumerate(batch.indexes) if index < sample_prompts * group_size]
    return [{"index": batch.indexes[i], **row} for i, row in zip(shown, credited.rows(shown), strict=True)]
