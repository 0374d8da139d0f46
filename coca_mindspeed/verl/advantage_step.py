"""One step's judged responses as groups, with their credit, on the rows of verl's batch."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from coca_mindspeed.algorithm.advantages import per_token_of_segment, segment_masks
from coca_mindspeed.algorithm.credit import SegmentCredit
from coca_mindspeed.errors import TrainingError
from coca_mindspeed.grading.verdict import Outcome
from coca_mindspeed.judging.batch_metrics import batch_metrics, values
from coca_mindspeed.judging.method_rules import credit_rule
from coca_mindspeed.judging.sample_rows import credit_rows
from coca_mindspeed.verl.groups import Groups, check_broken, find_groups
from coca_mindspeed.verl.judged_row import JudgedRow
from coca_mindspeed.verl.settings import VerlSettings


@dataclass(frozen=True, slots=True)
class StepShape:
    """What a step should hold: P questions with G responses each."""

    prompts: int
    group: int


@dataclass(frozen=True, slots=True)
class AdvantageStep:
    """A step of ``rows`` rows, of which ``B = P * G`` stand in whole groups.

    Attributes:
        groups: which rows these are.
        judged: of each of the B, group by group.
        correct: bool ``[P, G]``, as training rewards it; which answers count, ``credit.gradable`` says.
        confidence: float64 ``[P, G]``, NaN where the response is invalid.
        confidence_lengths: int64 ``[B]``, tokens up to the end of the stated confidence.
        response_lengths: int64 ``[B]``.
        credit: what the B earned and learn.
        advantages: float32 ``[rows, tokens]``, 0 on padding, on rows that fill up and on those of broken groups.
        segment_lengths: int64 ``[rows]``, tokens of each confidence segment, likewise 0.
        stage: of the method.
        stages: how many it has.
    """

    groups: Groups
    judged: tuple[JudgedRow, ...]
    correct: Tensor
    confidence: Tensor
    confidence_lengths: Tensor
    response_lengths: Tensor
    credit: SegmentCredit
    advantages: Tensor
    segment_lengths: Tensor
    stage: int
    stages: int

    @classmethod
    def of_batch(
        cls,
        *,
        keys: Sequence[str],
        tags: Sequence[Mapping[str, Any]],
        rows: Sequence[Mapping[str, Any]],
        response_lengths: Tensor,
        shape: StepShape,
        settings: VerlSettings,
        stage: int,
    ) -> "AdvantageStep":
        """Give credit to a batch of verl's.

        Args:
            keys: of its rows.
            tags: of its rows.
            rows: what the reward manager said of each.
            response_lengths: int ``[rows]`` on the CPU.
            shape: what the step should hold.
            settings: of the run.
            stage: of the method.

        Raises:
            TrainingError: more groups are broken than the settings allow, or no answer at all could be graded.
        """
        groups = find_groups(keys, tags, shape.group, shape.prompts)
        check_broken(groups.broken, settings.broken_groups, shape.prompts, "groups")
        if not groups.rows:
            raise TrainingError(f"none of the {shape.prompts} groups has all of its {shape.group} responses")
        judged = tuple(JudgedRow.from_columns(rows[row], f"row {keys[row]}") for row in groups.rows)
        _check_gradable(judged)
        order = torch.tensor(groups.rows)
        correct = torch.tensor([row.trained.correct for row in judged]).view(-1, shape.group)
        graded = torch.tensor([row.trained.outcome is not Outcome.UNGRADABLE for row in judged]).view(-1, shape.group)
        stated = [math.nan if (s := row.prediction.confidence) is None else s for row in judged]
        confidence = torch.tensor(stated, dtype=torch.float64).view(-1, shape.group)
        confidence_lengths = torch.tensor([row.confidence_tokens for row in judged])
        lengths, width = response_lengths.long()[order], int(response_lengths.max())
        rule = credit_rule(settings.method, stage)
        credit = rule(correct, confidence, confidence_lengths, lengths, width, gradable=graded)
        tokens = credit.tokens
        if settings.method.loss_aggregation == "segment_mean":
            tokens = per_token_of_segment(tokens, segment_masks(credit.segment_lengths, lengths, width))
        advantages = torch.zeros(len(keys), width)
        advantages[order] = tokens
        segment_lengths = torch.zeros(len(keys), dtype=torch.int64)
        segment_lengths[order] = credit.segment_lengths
        return cls(
            groups=groups,
            judged=judged,
            correct=correct,
            confidence=confidence,
            confidence_lengths=confidence_lengths,
            response_lengths=lengths,
            credit=credit,
            advantages=advantages,
            segment_lengths=segment_lengths,
            stage=stage,
            stages=len(settings.method.training_method.stages),
        )

    def metrics(self) -> dict[str, float]:
        """By the names of every engine; those that are undefined are left out."""
        found = values(batch_metrics(self.correct, self.confidence, self.response_lengths, self.credit))
        found["group/broken"] = float(self.groups.broken)
        if self.stages > 1:
            found["stage"] = float(self.stage)
        return {name: value for name, value in found.items() if math.isfinite(value)}

    def dump(self, step: int, prompts: int) -> list[dict[str, Any]]:
        """JSON rows of the first ``prompts`` whole groups: what was asked, said, graded and learned."""
        shown = range(min(prompts * self.groups.size, len(self.judged)))
        credited = credit_rows(
            shown, self.correct, self.confidence, self.confidence_lengths, self.response_lengths, self.credit
        )
        return [
            {
                "step": step,
                "id": row.prediction.id,
                "dataset": row.prediction.dataset,
                "question": row.prediction.question,
                "gold": row.prediction.gold,
                "response": row.prediction.response,
                "verdict": row.trained.outcome.value,
                "reason": row.trained.reason,
                **credit,
            }
            for row, credit in zip((self.judged[row] for row in shown), credited, strict=True)
        ]


def _check_gradable(judged: Sequence[JudgedRow]) -> None:
    """An answer that cannot be graded is left out and counted; where none can, nothing can be learned."""
    if all(row.trained.outcome is Outcome.UNGRADABLE for row in judged):
        raise TrainingError(f"none of the step's {len(judged)} answers could be graded: {judged[0].trained.reason}")
