"""Which rows of a batch of verl's are the responses to one question.

verl names a row ``UID_SESSION_INDEX``: the question's draw, which of its samples, and which turn of it.  A batch may
be reordered for balance, may lack the responses of failed sessions, and may hold rows that only fill it up.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from coca_mindspeed.algorithm.advantages import per_token_of_segment, segment_masks
from coca_mindspeed.algorithm.credit import SegmentCredit
from coca_mindspeed.errors import TrainingError
from coca_mindspeed.grading.verdict import Outcome
from coca_mindspeed.scoring.metrics import batch_metrics, values
from coca_mindspeed.scoring.responses import credit_rule
from coca_mindspeed.scoring.rows import credit_rows, held_out_metrics
from coca_mindspeed.verl.reward_queue import JudgedRow
from coca_mindspeed.verl.settings import VerlSettings


@dataclass(frozen=True, slots=True)
class Groups:
    """Groups of a batch.

    Attributes:
        rows: of the whole groups, one group after the other, samples in order; indexes into the batch.
        size: G.
        broken: how many groups lack at least one of their responses.
    """

    rows: tuple[int, ...]
    size: int
    broken: int


def find_groups(keys: Sequence[str], tags: Sequence[Mapping[str, Any]], size: int, expected: int) -> Groups:
    """Take a batch apart.

    Args:
        keys: of the rows.
        tags: of the rows; those that fill the batch up have ``is_padding``.
        size: responses that each question has.
        expected: questions that the batch should have; one that is not there at all counts as broken.

    Raises:
        TrainingError: a key of another form, more than one turn or sample where there should be one, or too many
            questions.
    """
    groups: dict[str, dict[int, int]] = {}
    for row, (key, tag) in enumerate(zip(keys, tags, strict=True)):
        if tag.get("is_padding", False):
            continue
        uid, session, turn = _parts(key)
        if turn != 0:
            raise TrainingError(f"row {key}: a response has one turn, found a second one")
        if session in (group := groups.setdefault(uid, {})):
            raise TrainingError(f"row {key}: sample {session} of its question was there already")
        group[session] = row
    if len(groups) > expected:
        raise TrainingError(f"{len(groups)} questions in a step of data.train_batch_size {expected}")
    whole = [group for group in groups.values() if len(group) == size]
    if larger := [uid for uid, group in groups.items() if len(group) > size]:
        raise TrainingError(f"question {larger[0]}: {len(groups[larger[0]])} responses, rollout.n is {size}")
    rows = tuple(group[session] for group in whole for session in sorted(group))
    return Groups(rows, size, expected - len(whole))


def _parts(key: str) -> tuple[str, int, int]:
    parts = key.rsplit("_", 2)
    if len(parts) != 3 or not (parts[1].isdecimal() and parts[2].isdecimal()):
        raise TrainingError(f"row {key!r}: expected a key UID_SESSION_INDEX")
    return parts[0], int(parts[1]), int(parts[2])


def check_broken(broken: int, allowed: int, total: int, what: str) -> None:
    """Refuse more broken groups than the settings allow.

    Raises:
        TrainingError: there are more.
    """
    if broken > allowed:
        raise TrainingError(
            f"{broken} of {total} {what} lack responses because sessions of verl's failed (its log says why), and "
            f"coca.broken_groups allows {allowed}"
        )


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


@dataclass(frozen=True, slots=True)
class JudgedValidation:
    """Judged responses to held-out questions, one each."""

    rows: tuple[JudgedRow, ...]

    def metrics(self) -> dict[str, float]:
        """The paper's six columns under ``eval/``, and for several data sets those of each under its name."""
        by_set: dict[str, list[JudgedRow]] = defaultdict(list)
        for row in self.rows:
            by_set[row.prediction.dataset].append(row)
        found = _named("eval", self.rows)
        if len(by_set) > 1:
            for dataset, rows in by_set.items():
                found |= _named(f"eval/{dataset}", rows)
        return found


def judged_validation(columns: Mapping[str, Sequence[Any]]) -> JudgedValidation:
    """Rows of a validation from verl's lists, one for each entry of what the reward manager said.

    Raises:
        TrainingError: another reward manager judged them.
    """
    ours = [name for name in ("prediction", "verdict", "reason", "confidence_tokens") if name in columns]
    count = len(columns["reward"])
    return JudgedValidation(
        tuple(
            JudgedRow.from_columns({name: columns[name][row] for name in ours}, f"validation response {row}")
            for row in range(count)
        )
    )


def _named(prefix: str, rows: Sequence[JudgedRow]) -> dict[str, float]:
    if not rows:
        return {}
    stated = [math.nan if (s := row.prediction.confidence) is None else s for row in rows]
    metrics = held_out_metrics(
        torch.tensor([bool(row.prediction.correct) for row in rows]),
        torch.tensor([row.prediction.correct is not None for row in rows]),
        torch.tensor(stated, dtype=torch.float64),
        torch.tensor([row.confidence_tokens for row in rows]),
    )
    return {f"{prefix}/{name}": value for name, value in metrics.items()}
