"""The advantage stage: computes token advantages of whole groups."""

import time
from typing import Any

from coca_mindspeed.errors import TrainingError
from coca_mindspeed.mindspeed.stages import columns
from coca_mindspeed.mindspeed.stages.dock import batches, check_groups, merged, put, report
from coca_mindspeed.mindspeed.stages.metrics import as_ratios
from coca_mindspeed.mindspeed.start.settings import CocaSettings
from coca_mindspeed.scoring.metrics import rollout_metrics
from coca_mindspeed.scoring.responses import credit_rule
from coca_mindspeed.scoring.rollout import Rollout

_COLUMNS = ("response_length", *columns.REWARD_COLUMNS)


def compute_advantages(
    dock: Any,
    settings: CocaSettings,
    *,
    count: int,
    group_size: int,
    rows: int,
    guarantee_order: bool,
    sample_prompts: int,
) -> list[dict[str, Any]]:
    """Take all scored rows of the iteration out of the dock and write ``advantages``, ``returns``, segment lengths.

    ``count`` rows are taken and written at a time, of ``rows`` in the iteration, in order with ``guarantee_order``.

    Returns:
        ``index`` and :meth:`Rollout.rows` of the responses to the first ``sample_prompts`` prompts.
    """
    if count % group_size:
        raise TrainingError(
            f"rl_config.adv_dispatch_size {count} does not hold whole groups of n_samples_per_prompt {group_size}"
        )
    assigned = [list(range(i, min(i + count, rows))) for i in range(0, rows, count)] if guarantee_order else None
    portions = batches(
        dock, "compute_advantage", _COLUMNS, count, assigned=assigned, stall_timeout=settings.stall_timeout
    )
    batch = merged(list(portions))  # method.advantage_scale=batch needs the whole step
    start = time.perf_counter()
    check_groups(batch.indexes, group_size)
    if len(batch.indexes) != rows:
        raise TrainingError(f"the advantage stage got {len(batch.indexes)} rows of an iteration of {rows}")
    lengths = batch.scalars("response_length").long()
    rollout = Rollout(group_size=group_size, lengths=lengths, width=int(lengths.max()))
    rollout.stated = batch.scalars(columns.STATED).view(-1, group_size)
    rollout.confidence_lengths = batch.scalars(columns.CONFIDENCE_LENGTH).long()
    rollout.correct = batch.scalars(columns.CORRECT).view(-1, group_size)
    rollout.give_credit(credit_rule(settings.method, settings.stage))
    shipped = rollout.training_columns()
    tokens = [row[:length] for row, length in zip(shipped["advantages"], lengths.tolist(), strict=True)]
    segment = shipped["segment_length"].unsqueeze(1)
    for first in range(0, rows, count):
        part = slice(first, first + count)
        own, lengths_of = tokens[part], segment[part]
        put(dock, {"advantages": own, "returns": own, columns.SEGMENT_LENGTH: lengths_of}, batch.indexes[part])
    metrics = {**as_ratios(rollout_metrics(rollout)), "seconds/advantage": time.perf_counter() - start}
    report(dock, {name: [value] for name, value in metrics.items()})
    shown = [row for row, index in enumerate(batch.indexes) if index < sample_prompts * group_size]
    return [{"index": batch.indexes[i], **row} for i, row in zip(shown, rollout.rows(shown), strict=True)]
