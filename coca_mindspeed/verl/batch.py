"""verl's batches: which rows form a group, their advantages, and the metrics of a validation.

verl names a row ``UID_SESSION_INDEX``: prompt, sample, turn.  A batch may be in any order, may lack the responses of
failed sessions, and may hold padding rows.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from coca_mindspeed.algorithm.credit import CreditRule
from coca_mindspeed.errors import TrainingError
from coca_mindspeed.evaluation.predictions import Prediction
from coca_mindspeed.scoring.metrics import (
    WeightedMean,
    confidence_metrics,
    rollout_metrics,
    sight_metrics,
    values,
    weighted_means,
)
from coca_mindspeed.scoring.responses import held_out_gap, held_out_metrics
from coca_mindspeed.scoring.rollout import SCORE_COLUMNS, Credited, Scored, confidence_log_probs
from coca_mindspeed.verl.settings import VerlSettings


class CompleteGroups(NamedTuple):
    """Rows of the complete groups, group by group, and the number of incomplete groups."""

    rows: tuple[int, ...]
    broken: int


def find_groups(keys: Sequence[str], tags: Sequence[Mapping[str, Any]], size: int, expected: int) -> CompleteGroups:
    """Find the complete groups, of ``size`` responses, among the rows with these keys and tags.

    Rows whose tag ``is_padding`` is set are left out; of ``expected`` prompts, one without any response is broken.
    Raises TrainingError for a malformed key, a second turn, a repeated sample, or too many prompts or responses.
    """
    groups: dict[str, dict[int, int]] = {}
    for row, (key, tag) in enumerate(zip(keys, tags, strict=True)):
        if tag.get("is_padding", False):
            continue
        uid, *numbers = key.rsplit("_", 2)
        if len(numbers) != 2 or not all(number.isdecimal() for number in numbers):
            raise TrainingError(f"row {key!r}: expected a key UID_SESSION_INDEX")
        session, turn = map(int, numbers)
        if turn != 0:
            raise TrainingError(f"row {key}: expected one turn a response, found a second turn")
        if session in (group := groups.setdefault(uid, {})):
            raise TrainingError(f"row {key}: sample {session} of this prompt occurs twice")
        group[session] = row
    if len(groups) > expected:
        raise TrainingError(f"expected data.train_batch_size={expected} prompts in a step, found {len(groups)}")
    for uid, group in groups.items():
        if len(group) > size:
            raise TrainingError(f"prompt {uid}: expected rollout.n={size} responses, found {len(group)}")
    whole = [group for group in groups.values() if len(group) == size]
    return CompleteGroups(tuple(group[session] for group in whole for session in sorted(group)), expected - len(whole))


def check_broken(broken: int, allowed: int, total: int, kind: str) -> None:
    """Raise ``TrainingError`` if more groups (or questions) are broken than ``coca.broken_groups`` allows."""
    if broken > allowed:
        raise TrainingError(
            f"{broken} of {total} {kind} are incomplete because rollouts failed (see verl's log); "
            f"coca.broken_groups allows {allowed}"
        )


@dataclass(frozen=True, slots=True)
class ScoredStep:
    """The ``B`` scored responses of a step's complete groups, group by group.

    Attributes:
        order: int64 ``[B]``, their rows among the ``rows`` of verl's batch, which has padding and broken groups too.
        broken: groups that lack a response.
        reports: of each response, by the reward manager.
        stage: of the method; None if it has only one.
        cut_off: share of the responses with the most tokens that there may be; NaN if that is unknown.
    """

    credited: Credited
    order: Tensor
    rows: int
    broken: int
    reports: Sequence[Mapping[str, Any]]
    stage: int | None
    cut_off: float = math.nan

    def columns(self) -> dict[str, Tensor]:
        """``advantages`` and ``segment_ends`` of all ``rows``; 0 for padding and broken groups."""
        credited = self.credited
        columns = {"advantages": credited.token_advantages, "segment_ends": credited.scored.segment_ends}
        return {
            name: torch.zeros(self.rows, *column.shape[1:], dtype=column.dtype).index_copy_(0, self.order, column)
            for name, column in columns.items()
        }

    def dump(self, step: int, prompts: int) -> list[dict[str, Any]]:
        """JSON rows of all responses to the first ``prompts`` prompts."""
        shown = range(min(prompts * self.credited.credit.group_size, len(self.order)))
        names = ("id", "dataset", "question", "gold", "response")
        return [
            {
                "step": step,
                **{name: report["prediction"][name] for name in names},
                **{name: report[name] for name in ("verdict", "reason")},
                **row,
            }
            for report, row in zip(self.reports, self.credited.rows(shown), strict=False)
        ]


def score_step(
    *,
    keys: Sequence[str],
    tags: Sequence[Mapping[str, Any]],
    rows: Sequence[Mapping[str, Any]],
    response_lengths: Tensor,
    old_log_probs: Tensor | None = None,
    prompts: int,
    group: int,
    settings: VerlSettings,
    stage: int,
    longest: int | None = None,
) -> ScoredStep:
    """Compute the advantages of a batch of verl's, of whole groups among P ``prompts`` of G responses (``group``).

    ``keys``, ``tags`` and ``rows`` are of its rows, the last as :meth:`.ScoringQueue.score` reports them;
    ``response_lengths`` is int ``[rows]``, at most ``longest`` (None: unknown), and ``old_log_probs``, for an entropy
    bonus, float ``[rows, T]``, on the CPU.
    Raises TrainingError if more groups are broken than the settings allow, or no answer could be graded.
    """
    groups = find_groups(keys, tags, group, prompts)
    check_broken(groups.broken, settings.broken_groups, prompts, "groups")
    if not groups.rows:
        raise TrainingError(f"none of the {prompts} groups has all of its {group} responses")
    reports = [_checked(rows[row], f"row {keys[row]}") for row in groups.rows]
    scored = Scored.from_columns(_score_columns(reports))
    if bool(scored.correct.isnan().all()):
        raise TrainingError(f"none of the step's {len(reports)} answers could be graded: {reports[0]['reason']}")
    rule, order = CreditRule(settings.method, stage), torch.tensor(groups.rows)
    of_rows = None if old_log_probs is None else old_log_probs[order]
    log_probs = confidence_log_probs(rule, of_rows, scored.segment_ends)
    credited = scored.give_credit(rule, group, log_probs=log_probs, width=int(response_lengths.max()))
    named = stage if len(settings.method.training_method.stages) > 1 else None
    cut_off = math.nan if longest is None else float((response_lengths[order] >= longest).double().mean())
    return ScoredStep(credited, order, len(keys), groups.broken, reports, named, cut_off)


def step_metrics(parts: Sequence[ScoredStep], *, repeated: bool = False) -> dict[str, float]:
    """Defined metrics of a step, by the names that every engine uses.

    Args:
        parts: its mini-batches, at least one.
        repeated: the step is not of the first epoch.
    """
    whole, stage = Scored.joined([part.credited.scored for part in parts]), parts[0].stage
    seen = [repeated] * sum(len(part.credited.credit.gesr) for part in parts)
    cut_off = [WeightedMean(part.cut_off, len(part.order) * (not math.isnan(part.cut_off))) for part in parts]
    shares = ({"response/cut_off_share": share} for share in cut_off)
    means = weighted_means([*(rollout_metrics(part.credited) for part in parts), *shares])
    found = values({**means, **confidence_metrics(whole), **sight_metrics(whole, seen)})
    metrics = {name: value for name, value in found.items() if math.isfinite(value)}
    metrics["group/broken"] = float(sum(part.broken for part in parts))
    return metrics if stage is None else {**metrics, "stage": float(stage)}


def score_rows(scored: Scored) -> list[dict[str, list[float | None]]]:
    """The columns of :meth:`.Scored.columns` as values for JSON, by response; None for NaN."""
    columns = {
        name: [[None if math.isnan(value) else value for value in row] for row in column.tolist()]
        for name, column in scored.columns().items()
    }
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _score_columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
    """The columns that :func:`score_rows` returned."""
    return {
        name: torch.tensor([[math.nan if value is None else value for value in row[name]] for row in rows], dtype=dtype)
        for name, dtype in SCORE_COLUMNS.items()
    }


def _checked(report: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    if missing := {"prediction", "verdict", "reason", *SCORE_COLUMNS} - report.keys():
        raise TrainingError(
            f"{where}: verl's reward_extra_info has no {min(missing)!r}, found {sorted(report)}; expected "
            "reward.reward_manager.name=coca"
        )
    return report


def validation_predictions(reports: Mapping[str, Sequence[Any]]) -> list[Prediction]:
    """Predictions of a validation from the lists that verl makes of the reward manager's reports."""
    _checked(reports, "validation")
    return [Prediction(**row) for row in reports["prediction"]]


def validation_metrics(predictions: Sequence[Prediction]) -> dict[str, float]:
    """The paper's six columns under ``eval/``; for several data sets also under ``eval/DATASET/``.

    ``held_out/`` has accuracy and stated confidence by :func:`.held_out_gap`.
    """
    datasets = list(dict.fromkeys(prediction.dataset for prediction in predictions))
    named = {"eval": list(predictions)} if predictions else {}
    if len(datasets) > 1:
        named |= {f"eval/{name}": [row for row in predictions if row.dataset == name] for name in datasets}
    metrics: dict[str, float] = {}
    for prefix, rows in named.items():
        metrics |= {f"{prefix}/{name}": value for name, value in held_out_metrics(rows).items()}
    gap = values(held_out_gap(predictions)) if predictions else {}
    return metrics | {name: value for name, value in gap.items() if math.isfinite(value)}
