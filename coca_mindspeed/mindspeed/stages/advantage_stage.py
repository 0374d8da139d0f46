"""The advantage stage: whole groups in, token-level advantages out."""

import time
from collections.abc import Sequence
from typing import Any

from coca_mindspeed.errors import TrainingError
from coca_mindspeed.mindspeed.stages import columns
from coca_mindspeed.mindspeed.stages.dock import batches, check_groups, put, report
from coca_mindspeed.mindspeed.stages.metrics import as_ratios
from coca_mindspeed.mindspeed.start.settings import CocaSettings
from coca_mindspeed.scoring.metrics import batch_metrics
from coca_mindspeed.scoring.responses import credit_rule
from coca_mindspeed.scoring.rows import credit_rows

#: What the stage reads.
COLUMNS = ("response_length", "rm_scores", *columns.REWARD_COLUMNS)


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
    """Take all judged rows of the iteration out of the dock and write their ``advantages`` and ``returns``.

    Args:
        dock: handle of the dock's actor.
        settings: of this run.
        count: rows at a time; whole groups.
        group_size: responses to each prompt.
        rows: of the iteration, all prompts together.
        guarantee_order: take the rows in order.
        sample_prompts: how many prompts' rows to return, for a dump of samples.

    Returns:
        the rows of the first ``sample_prompts`` prompts: ``index``, and what :func:`credit_rows` tells of each.
    """
    if count % group_size:
        raise TrainingError(
            f"rl_config.adv_dispatch_size {count} does not hold whole groups of n_samples_per_prompt {group_size}"
        )
    assigned: Sequence[Sequence[int]] | None = None
    if guarantee_order:
        assigned = [list(range(start, min(start + count, rows))) for start in range(0, rows, count)]
    rule = credit_rule(settings.method, settings.stage)
    samples: list[dict[str, Any]] = []
    for batch in batches(
        dock, "compute_advantage", COLUMNS, count, assigned=assigned, stall_timeout=settings.stall_timeout
    ):
        start = time.perf_counter()
        check_groups(batch.indexes, group_size)
        groups = (-1, group_size)
        correct = (batch.scalars("rm_scores") > 0.5).view(groups)
        gradable = (batch.scalars(columns.GRADABLE) != 0).view(groups)
        confidence = batch.scalars(columns.CONFIDENCE).view(groups)
        confidence_lengths = batch.scalars(columns.CONFIDENCE_LENGTH).long()
        lengths = batch.scalars("response_length").long()
        credit = rule(correct, confidence, confidence_lengths, lengths, int(lengths.max()), gradable)
        token_rows = [row[:length] for row, length in zip(credit.tokens, lengths.tolist(), strict=True)]
        put(dock, {"advantages": token_rows, "returns": token_rows}, batch.indexes)
        metrics = as_ratios(batch_metrics(correct, confidence, lengths, credit))
        metrics["seconds/advantage"] = time.perf_counter() - start
        report(dock, {name: [value] for name, value in metrics.items()})
        shown = [row for row, index in enumerate(batch.indexes) if index < sample_prompts * group_size]
        credited = credit_rows(shown, correct, confidence, confidence_lengths, lengths, credit)
        samples += [{"index": batch.indexes[row], **row_} for row, row_ in zip(shown, credited, strict=True)]
    return sorted(samples, key=lambda sample: sample["index"])
