"""Metrics of a rollout, and warnings when a run stops learning."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from coca_mindspeed.evaluation.metrics import calibration_metrics

if TYPE_CHECKING:
    from torch import Tensor

    from coca_mindspeed.scoring.rollout import Rollout


class Mean(NamedTuple):
    """A mean over ``weight`` entries; NaN over none."""

    value: float
    weight: float


def rollout_metrics(rollout: Rollout) -> dict[str, Mean]:
    """Metrics of a rollout with credit, each with its weight; rewards and accuracy are over the gradable answers."""
    correct, stated, credit = rollout.correct, rollout.stated, rollout.credit
    graded, kept, reward = ~correct.isnan(), credit.kept, credit.confidence_reward
    measured = calibration_metrics(stated[graded].numpy(), correct[graded].bool().numpy())
    accuracy = measured.values["accuracy"]
    ends = rollout.segment_ends.double()
    lengths = dict(zip(credit.segments, ends.diff(dim=1, prepend=ends.new_zeros(len(ends), 1)).T, strict=True))
    every, n_graded, n_kept = correct.numel(), int(graded.sum()), int(kept.sum())
    of_confidence = ("ece", "auroc", "brier")
    means = {
        "grading/ungradable_share": (_share(~graded), every),
        "rollout/invalid_share": (_share(stated.isnan()), every),
        "response/length": (float(ends[:, -1].mean()), every),
        **{f"response/{segment}_length": (float(own.mean()), every) for segment, own in lengths.items()},
        "rollout/confidence": (float(stated.nanmean()), int((~stated.isnan()).sum())),
        "reward/answer": (accuracy, n_graded),
        "rollout/accuracy": (accuracy, n_graded),
        "reward/confidence": (float(reward.nanmean()), int((~reward.isnan()).sum())),
        **{f"rollout/{name}": (measured.values[name], measured.n_valid) for name in of_confidence},
        "group/dropped_share": (_share(~kept), len(correct)),
        "rollout/gesr": (float(credit.gesr.nanmean()), n_kept),
        **{
            f"group/no_{segment}_variance_share": (_share(~advantage.varies[kept]), n_kept)
            for segment, advantage in credit.segments.items()
            if advantage is not None
        },
    }
    if rollout.stated_after is not None:
        after = calibration_metrics(rollout.stated_after[graded].numpy(), correct[graded].bool().numpy())
        means |= {f"rollout/{name}_after": (after.values[name], after.n_valid) for name in of_confidence}
    if credit.deviation:
        means["advantage/deviation"] = (credit.deviation, 1)
    # Undefined, e.g. AUROC where all answers are right: no weight.
    return {name: Mean(value, 0 if math.isnan(value) else weight) for name, (value, weight) in means.items()}


def _share(where: Tensor) -> float:
    return float(where.double().mean())


def values(metrics: Mapping[str, Mean]) -> dict[str, float]:
    """The values alone, NaN where undefined."""
    return {name: mean.value for name, mean in metrics.items()}


NO_SIGNAL_STEPS = 5  # consecutive steps; one of them may be bad luck
_NEARLY_ALL = 0.95
_MOST = 0.5
_UNGRADABLE = 0.05


def health_problems(rows: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Find reasons why a run learns less than it should, in consecutive steps (rows of metrics.jsonl).

    Missing metrics are ignored.

    Returns:
        Text for the user by code: ``invalid``, ``no_signal`` (in neither segment), ``no_confidence_signal``,
        ``no_answer_signal``, ``ungradable`` or ``cut_off``.
    """
    invalid, ungradable = _mean(rows, "rollout/invalid_share"), _mean(rows, "grading/ungradable_share")
    cut_off, accuracy = _mean(rows, "response/cut_off_share"), _mean(rows, "rollout/accuracy")
    confidence = _mean(rows, "group/no_confidence_variance_share")
    answer = _mean(rows, "group/no_answer_variance_share")  # NaN if the answers earn nothing (log_score)
    problems = {}
    if invalid > _MOST:
        problems["invalid"] = f"{invalid:.0%} of the responses state no valid confidence"
    if confidence >= _NEARLY_ALL and answer >= _NEARLY_ALL:
        problems["no_signal"] = (
            f"nothing to learn: in {confidence:.0%} of the groups all confidence rewards are equal, in {answer:.0%} "
            "all answer rewards, so their advantages are 0"
        )
    elif confidence >= _NEARLY_ALL:
        problems["no_confidence_signal"] = (
            f"the confidence segments learn nothing: their rewards are equal in {confidence:.0%} of the groups"
        )
    elif answer >= _NEARLY_ALL:
        shown = "" if math.isnan(accuracy) else f" (accuracy {accuracy:.3f})"
        problems["no_answer_signal"] = (
            f"the answer segments learn nothing: their rewards are equal in {answer:.0%} of the groups{shown}"
        )
    if ungradable > _UNGRADABLE:
        problems["ungradable"] = f"{ungradable:.0%} of the answers could not be graded (reasons in samples/)"
    if cut_off > _MOST:
        problems["cut_off"] = f"{cut_off:.0%} of the responses are cut off at rollout.max_new_tokens"
    return problems


class HealthWarnings:
    """Warns when a problem appears, and again when it returns after :data:`NO_SIGNAL_STEPS` steps without it."""

    def __init__(self) -> None:
        self._recent: deque[Mapping[str, Any]] = deque(maxlen=NO_SIGNAL_STEPS)
        self._last_seen: dict[str, int] = {}

    def after_step(self, step: int, metrics: Mapping[str, Any]) -> str | None:
        """Add the metrics of ``step`` (from 1) and return a warning, or None if no problem is new."""
        self._recent.append(dict(metrics))
        if len(self._recent) < NO_SIGNAL_STEPS:
            return None
        problems = health_problems(self._recent)
        new = [
            text
            for code, text in problems.items()
            if step - self._last_seen.get(code, -NO_SIGNAL_STEPS) > NO_SIGNAL_STEPS
        ]
        self._last_seen |= dict.fromkeys(problems, step)
        if not new:
            return None
        steps = f"steps {step - NO_SIGNAL_STEPS + 1} to {step}"
        return f"warning: {steps}: {'; '.join(new)} (see docs/training.md)"


def _mean(rows: Sequence[Mapping[str, Any]], name: str) -> float:
    """The mean of a metric over the rows that have it; NaN, for which every comparison is false, if none has."""
    values = [float(row[name]) for row in rows if row.get(name) is not None]
    return sum(values) / len(values) if values else math.nan
