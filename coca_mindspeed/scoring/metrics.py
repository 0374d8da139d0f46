"""Metrics of a rollout, and warnings when a run stops learning."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from coca_mindspeed.evaluation.metrics import calibration_metrics

if TYPE_CHECKING:
    from coca_mindspeed.scoring.rollout import Rollout


class Mean(NamedTuple):
    """A mean over ``weight`` entries; NaN over none."""

    value: float
    weight: float


def rollout_metrics(rollout: Rollout) -> dict[str, Mean]:
    """Metrics of a rollout with credit, each with its weight; rewards and accuracy are over the gradable answers."""
    correct, stated, credit = rollout.correct, rollout.stated, rollout.credit
    graded, kept = ~correct.isnan(), credit.kept
    measured = calibration_metrics(stated[graded].numpy(), correct[graded].bool().numpy())
    accuracy = measured.values["accuracy"]
    ends = rollout.segment_ends.double()
    lengths = dict(zip(credit.segments, ends.diff(dim=1, prepend=ends.new_zeros(len(ends), 1)).T, strict=True))
    earned = ~credit.confidence_reward.isnan()
    means = [
        (
            correct.numel(),
            {
                "grading/ungradable_share": float((~graded).double().mean()),
                "rollout/invalid_share": float(stated.isnan().double().mean()),
                "response/length": float(ends[:, -1].mean()),
                **{f"response/{segment}_length": float(own.mean()) for segment, own in lengths.items()},
            },
        ),
        (int((~stated.isnan()).sum()), {"rollout/confidence": float(stated.nanmean())}),
        (
            int(graded.sum()),
            {"reward/answer": accuracy, "rollout/accuracy": accuracy},
        ),
        (int(earned.sum()), {"reward/confidence": float(credit.confidence_reward.nanmean())}),
        (
            measured.n_valid,
            {
                "rollout/ece": measured.values["ece"],
                "rollout/auroc": measured.values["auroc"],
                "rollout/brier": measured.values["brier"],
            },
        ),
        (len(correct), {"group/dropped_share": float((~kept).double().mean())}),
        (
            int(kept.sum()),
            {
                "rollout/gesr": float(credit.gesr.nanmean()),
                **{
                    f"group/no_{segment}_variance_share": float((~advantage.varies[kept]).double().mean())
                    for segment, advantage in credit.segments.items()
                    if advantage is not None
                },
            },
        ),
    ]
    if rollout.stated_after is not None:
        after = calibration_metrics(rollout.stated_after[graded].numpy(), correct[graded].bool().numpy())
        names = ("ece", "auroc", "brier")
        means.append((after.n_valid, {f"rollout/{name}_after": after.values[name] for name in names}))
    if credit.deviation:
        means.append((1, {"advantage/deviation": credit.deviation}))
    return {
        # Undefined, e.g. AUROC where all answers are right: no weight.
        name: Mean(value, 0 if math.isnan(value) else weight)
        for weight, values in means
        for name, value in values.items()
    }


def values(metrics: Mapping[str, Mean]) -> dict[str, float]:
    """The values alone, NaN where undefined."""
    return {name: mean.value for name, mean in metrics.items()}


NO_SIGNAL_STEPS = 5  # consecutive steps; one of them may be bad luck
_NEARLY_ALL = 0.95
_MOST = 0.5
_UNGRADABLE = 0.05


@dataclass(frozen=True, slots=True)
class HealthProblem:
    """A reason why a run learns less than it should.

    Attributes:
        code: ``invalid``, ``no_signal`` (in neither segment), ``no_confidence_signal``, ``no_answer_signal``,
            ``ungradable`` or ``cut_off``.
        text: for the user.
    """

    code: str
    text: str


def health_problems(rows: Sequence[Mapping[str, Any]]) -> list[HealthProblem]:
    """Find problems in the mean metrics of consecutive steps (rows of metrics.jsonl); missing metrics are ignored."""
    invalid = _mean(rows, "rollout/invalid_share")
    ungradable = _mean(rows, "grading/ungradable_share")
    cut_off = _mean(rows, "response/cut_off_share")
    problems = []
    if invalid > _MOST:
        problems.append(HealthProblem("invalid", f"{invalid:.0%} of the responses state no valid confidence"))
    problems += _segment_problems(rows)
    if ungradable > _UNGRADABLE:
        problems.append(
            HealthProblem("ungradable", f"{ungradable:.0%} of the answers could not be graded (reasons in samples/)")
        )
    if cut_off > _MOST:
        problems.append(
            HealthProblem("cut_off", f"{cut_off:.0%} of the responses are cut off at rollout.max_new_tokens")
        )
    return problems


def _segment_problems(rows: Sequence[Mapping[str, Any]]) -> list[HealthProblem]:
    confidence = _mean(rows, "group/no_confidence_variance_share")
    answer = _mean(rows, "group/no_answer_variance_share")  # NaN if the answers earn nothing (log_score)
    if confidence >= _NEARLY_ALL and answer >= _NEARLY_ALL:
        text = (
            f"nothing to learn: in {confidence:.0%} of the groups all confidence rewards are equal, in {answer:.0%} "
            "all answer rewards, so their advantages are 0"
        )
        return [HealthProblem("no_signal", text)]
    if confidence >= _NEARLY_ALL:
        text = f"the confidence segments learn nothing: their rewards are equal in {confidence:.0%} of the groups"
        return [HealthProblem("no_confidence_signal", text)]
    if answer >= _NEARLY_ALL:
        accuracy = _mean(rows, "rollout/accuracy")
        shown = "" if math.isnan(accuracy) else f" (accuracy {accuracy:.3f})"
        text = f"the answer segments learn nothing: their rewards are equal in {answer:.0%} of the groups{shown}"
        return [HealthProblem("no_answer_signal", text)]
    return []


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
            problem.text
            for problem in problems
            if step - self._last_seen.get(problem.code, -NO_SIGNAL_STEPS) > NO_SIGNAL_STEPS
        ]
        self._last_seen |= {problem.code: step for problem in problems}
        if not new:
            return None
        steps = f"steps {step - NO_SIGNAL_STEPS + 1} to {step}"
        return f"warning: {steps}: {'; '.join(new)} (see docs/training.md)"


def _mean(rows: Sequence[Mapping[str, Any]], name: str) -> float:
    """The mean of a metric over the rows that have it; NaN, for which every comparison is false, if none has."""
    values = [float(row[name]) for row in rows if row.get(name) is not None]
    return sum(values) / len(values) if values else math.nan
