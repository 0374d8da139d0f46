"""The advantage stage: whole groups in, token-level advantages out."""

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from coca_mindspeed.algorithm.advantages import group_advantages, token_advantages
from coca_mindspeed.algorithm.response import as_stated
from coca_mindspeed.algorithm.rewards import group_success_rate
from coca_mindspeed.errors import TrainingError
from coca_mindspeed.mindspeed import columns
from coca_mindspeed.mindspeed.dock import batches, check_groups, put, report
from coca_mindspeed.mindspeed.metrics import batch_metrics
from coca_mindspeed.mindspeed.process import process_settings
from coca_mindspeed.mindspeed.settings import CocaSettings


def segment_lengths(confidence_lengths: Tensor, settings: CocaSettings) -> Tensor:
    """Tokens of each confidence *segment*: none for answer-first methods, whose one reward falls on every token.

    Args:
        confidence_lengths: int ``[n]``, tokens up to the end of the stated confidence.
        settings: tell where the method states its confidence.
    """
    first = settings.training_method.confidence_position == "first"
    return confidence_lengths if first else torch.zeros_like(confidence_lengths)


#: What the stage reads.
COLUMNS = ("responses", "response_length", "rm_scores", *columns.REWARD_COLUMNS)


class SegmentAdvantages(NamedTuple):
    """Advantages of ``n`` responses: per segment ``[n]``, and on tokens ``[n, width]``; and GESR ``[n]``."""

    confidence: Tensor
    answer: Tensor
    tokens: Tensor
    success_rate: Tensor


def segment_advantages(
    correct: Tensor,
    confidence: Tensor,
    confidence_lengths: Tensor,
    response_lengths: Tensor,
    width: int,
    *,
    group_size: int,
    settings: CocaSettings,
) -> SegmentAdvantages:
    """From judged responses to advantages on their tokens.

    Args:
        correct: bool ``[n]``, groups one after the other.
        confidence: float ``[n]``, NaN where invalid.
        confidence_lengths: int ``[n]``.
        response_lengths: int ``[n]``.
        width: tokens of the padded responses.
        group_size: responses to each prompt.
        settings: method, stage and the choices of method.md.

    Raises:
        TrainingError: ``n`` is not a multiple of ``group_size``.
    """
    if len(correct) % group_size:
        raise TrainingError(f"{len(correct)} responses are not whole groups of {group_size}")
    groups = (-1, group_size)
    rewards = settings.training_method.rewards(
        correct.view(groups), confidence.view(groups), stage=settings.stage, invalid_reward=settings.invalid_reward
    )
    of_confidence, of_answer = (
        group_advantages(segment, ddof=settings.advantage_ddof, eps=settings.advantage_eps).flatten()
        for segment in rewards
    )
    return SegmentAdvantages(
        of_confidence,
        of_answer,
        token_advantages(
            of_confidence, of_answer, segment_lengths(confidence_lengths, settings), response_lengths, width
        ),
        group_success_rate(correct.view(groups)).repeat(1, group_size).flatten(),
    )


def compute_advantages(
    dock: Any, *, count: int, group_size: int, rows: int, guarantee_order: bool, sample_prompts: int
) -> list[dict[str, Any]]:
    """Take all judged rows of the iteration out of the dock and write their ``advantages`` and ``returns``.

    Args:
        dock: handle of the dock's actor.
        count: rows at a time; whole groups.
        group_size: responses to each prompt.
        rows: of the iteration, all prompts together.
        guarantee_order: take the rows in order.
        sample_prompts: how many prompts' rows to return, for a dump of samples.

    Returns:
        ``index``, ``confidence``, ``correct``, ``success_rate``, ``confidence_advantage``, ``answer_advantage``,
        ``confidence_tokens`` and ``response_tokens`` of the rows of the first ``sample_prompts`` prompts.
    """
    settings = process_settings().coca
    if count % group_size:
        raise TrainingError(
            f"rl_config.adv_dispatch_size {count} does not hold whole groups of n_samples_per_prompt {group_size}"
        )
    assigned: Sequence[Sequence[int]] | None = None
    if guarantee_order:
        assigned = [list(range(start, min(start + count, rows))) for start in range(0, rows, count)]
    samples: list[dict[str, Any]] = []
    for batch in batches(
        dock, "compute_advantage", COLUMNS, count, assigned=assigned, stall_timeout=settings.stall_timeout
    ):
        start = time.perf_counter()
        check_groups(batch.indexes, group_size)
        correct = batch.scalars("rm_scores") > 0.5
        confidence = batch.scalars(columns.CONFIDENCE)
        confidence_lengths = batch.scalars(columns.CONFIDENCE_LENGTH).long()
        lengths = batch.scalars("response_length").long()
        result = segment_advantages(
            correct,
            confidence,
            confidence_lengths,
            lengths,
            int(lengths.max()),
            group_size=group_size,
            settings=settings,
        )
        token_rows = [row[:length] for row, length in zip(result.tokens, lengths.tolist(), strict=True)]
        put(dock, {"advantages": token_rows, "returns": token_rows}, batch.indexes)
        metrics = batch_metrics(
            correct.view(-1, group_size),
            confidence.view(-1, group_size),
            confidence_lengths,
            lengths,
            settings.training_method,
            stage=settings.stage,
            invalid_reward=settings.invalid_reward,
        )
        metrics["coca/advantage_seconds"] = time.perf_counter() - start
        report(dock, {name: [value] for name, value in metrics.items()})
        samples += _sample_rows(
            batch.indexes, sample_prompts * group_size, result, correct, confidence, confidence_lengths, lengths
        )
    return sorted(samples, key=lambda sample: sample["index"])


def _sample_rows(
    indexes: Sequence[int],
    below: int,
    result: SegmentAdvantages,
    correct: Tensor,
    confidence: Tensor,
    confidence_lengths: Tensor,
    lengths: Tensor,
) -> list[dict[str, Any]]:
    return [
        {
            "index": index,
            "confidence": None if confidence[i].isnan() else as_stated(float(confidence[i])),
            "correct": bool(correct[i]),
            "success_rate": float(result.success_rate[i]),
            "confidence_advantage": float(result.confidence[i]),
            "answer_advantage": float(result.answer[i]),
            "confidence_tokens": int(confidence_lengths[i]),
            "response_tokens": int(lengths[i]),
        }
        for i, index in enumerate(indexes)
        if index < below
    ]
