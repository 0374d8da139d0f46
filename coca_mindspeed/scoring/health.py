"""Warnings when a run stops learning, and the verdict on a trial, from rows of metrics.jsonl."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from coca_mindspeed.scoring.metrics import FIRST_SIGHT, HELD_OUT, LOG_PROB_GAP, REPEATED, TIMES_ASKED

if TYPE_CHECKING:
    from coca_mindspeed.algorithm.methods import TrainingMethod


class Gap(NamedTuple):
    """Accuracy, mean stated confidence, and the standard error of confidence minus accuracy."""

    accuracy: float
    confidence: float
    error: float

    @classmethod
    def of(cls, rows: Sequence[Mapping[str, Any]], name: str) -> Gap | None:
        """The mean over the rows of metrics.jsonl that have all three metrics of ``name``; None if none has."""
        keys = [f"{name}/{key}" for key in ("accuracy", "confidence", "gap_error")]
        known = [[float(row[key]) for key in keys] for row in rows if all(_known(row.get(key)) for key in keys)]
        if not known:
            return None
        accuracy, confidence, _ = (sum(column) / len(known) for column in zip(*known, strict=True))
        return cls(accuracy, confidence, math.hypot(*(row[2] for row in known)) / len(known))

    @property
    def difference(self) -> float:
        return self.confidence - self.accuracy


def _known(value: Any) -> bool:
    return value is not None and not math.isnan(value)


NO_SIGNAL_STEPS = 5  # consecutive steps; one of them may be bad luck
_NEARLY_ALL = 0.95
_MOST = 0.5
_UNGRADABLE = 0.05
# Nats a token.  Means of five steps: .26 to .72 in runs whose confidence kept learning (6 and 11 tokens a confidence),
# and below .1 4 to 397 steps before all rewards became equal (experiments/results/long, smollm2 and forms).  Behind an
# answer it is low without that: the answer decides it.
_LOW_ENTROPY = 0.1


def rewards_confidence(method: TrainingMethod | None) -> bool:
    """Whether a method rewards the confidence; so do custom methods without a base, and unknown ones (None)."""
    return bool(getattr(method, "rewards_confidence", True))


def _confidence_should_vary(method: TrainingMethod | None) -> bool:
    """Whether a method rewards a confidence that no answer before it decides."""
    return method is None or (method.confidence_position != "last" and rewards_confidence(method))


def health_problems(rows: Sequence[Mapping[str, Any]], method: TrainingMethod | None = None) -> dict[str, str]:
    """Find reasons why a run learns less than it should, in consecutive steps (rows of metrics.jsonl).

    Metrics that are missing or NaN are ignored; ``method`` None: not known.  Returns text for the user by code:
    ``invalid``, ``no_signal`` (in neither segment), ``no_confidence_signal``, ``low_entropy`` (it comes before; not of
    a method that states the confidence last or does not reward it), ``no_answer_signal``, ``ungradable``, ``cut_off``,
    ``open_thought``.
    """
    invalid, ungradable = _mean(rows, "rollout/invalid_share"), _mean(rows, "grading/ungradable_share")
    cut_off, accuracy = _mean(rows, "response/cut_off_share"), _mean(rows, "rollout/accuracy")
    confidence = _mean(rows, "group/no_confidence_variance_share")
    answer = _mean(rows, "group/no_answer_variance_share")  # NaN if the answers earn nothing (log_score)
    entropy = _mean(rows, "confidence/entropy")  # NaN if the engine does not measure it
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
    elif entropy < _LOW_ENTROPY and _confidence_should_vary(method):
        problems["low_entropy"] = (
            f"the confidence is becoming the same in all responses: its entropy is {entropy:.3f} nats a token"
        )
    if answer >= _NEARLY_ALL and not confidence >= _NEARLY_ALL:
        shown = "" if math.isnan(accuracy) else f" (accuracy {accuracy:.3f})"
        problems["no_answer_signal"] = (
            f"the answer segments learn nothing: their rewards are equal in {answer:.0%} of the groups{shown}"
        )
    if ungradable > _UNGRADABLE:
        problems["ungradable"] = f"{ungradable:.0%} of the answers could not be graded (reasons in samples/)"
    if cut_off > _MOST:
        problems["cut_off"] = f"{cut_off:.0%} of the responses are cut off at rollout.max_new_tokens"
    if (still_open := _mean(rows, "response/open_thought_share")) > _MOST:
        problems["open_thought"] = f"{still_open:.0%} of the responses do not end their thought, so they have no answer"
    return problems


#: Nats a token, mean of an iteration.  Two engines in bfloat16 differ by about 0.005 on dense models.
LARGEST_LOG_PROB_GAP = 0.05
_FIRST_STEPS = 2  # after which a run warns of what a trial fails by
_FEW_GROUPS = 8  # in fewer, all rewards may be equal by chance


def start_problems(rows: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Find reasons why the first steps (rows of metrics.jsonl) trained nothing, or another model than they sampled.

    Each holds in all rows, but for the gap.  Metrics that are missing, null or NaN are ignored, except a gap that is
    there and is no number.  Returns text for the user by code: ``invalid``, ``ungradable``, ``cut_off``,
    ``one_reward``, ``no_gradient`` or ``log_prob_gap``.
    """
    rewards = [
        _mean(rows, f"group/no_{segment}_variance_share") for segment in ("confidence", "answer", "confidence_after")
    ]
    defined = [share for share in rewards if not math.isnan(share)]
    conditions = {
        "invalid": (_mean(rows, "rollout/invalid_share") == 1, "no response states a valid confidence"),
        "ungradable": (_mean(rows, "grading/ungradable_share") == 1, "no answer could be graded (reasons in samples/)"),
        "cut_off": (
            _mean(rows, "response/cut_off_share") == 1,
            "all responses are cut off at rollout.max_new_tokens; increase it",
        ),
        "one_reward": (
            bool(defined) and min(defined) == 1,
            "in every group all rewards are equal, so all advantages are 0",
        ),
        "no_gradient": (_mean(rows, "actor/grad_norm") == 0, "the gradient is 0: nothing is trained"),
    }
    problems = {code: text for code, (holds, text) in conditions.items() if holds}
    return problems | gap_of_log_probs(rows)


def gap_of_log_probs(rows: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """``log_prob_gap`` with its text if the rollout of a row did not sample from the model that is trained."""
    for row in rows:
        gap = row.get(LOG_PROB_GAP, 0.0)
        if gap is None or not gap <= LARGEST_LOG_PROB_GAP:
            shown = "no number" if gap is None else f"{gap:.3g}"
            text = (
                f"{LOG_PROB_GAP} is {shown}, expected at most {LARGEST_LOG_PROB_GAP}: the rollout does not sample "
                "from the model that is trained"
            )
            return {"log_prob_gap": text}
    return {}


class TrialVerdict(NamedTuple):
    """Texts by code: what a trial fails by, and what it only warns of."""

    failures: dict[str, str]
    warnings: dict[str, str]


def judge_trial(rows: Sequence[Mapping[str, Any]], groups: int, *, warm_up_left_out: bool = False) -> TrialVerdict:
    """Judge a trial by the metrics of its steps; the codes are those of :func:`start_problems`.

    In fewer than 8 ``groups`` (of all steps together), one reward in each is a warning, with the gradient that is 0
    by it.  Where a format warm-up was left out, so is that no confidence is valid, with what follows from it.
    """
    problems = start_problems(rows)
    mild: set[str] = set()
    if "one_reward" in problems and groups < _FEW_GROUPS:
        mild |= {"one_reward", "no_gradient"}
    if "invalid" in problems and warm_up_left_out:
        mild |= {"invalid", "one_reward", "no_gradient"}
    failures = {code: text for code, text in problems.items() if code not in mild}
    return TrialVerdict(failures, {code: text for code, text in problems.items() if code in mild})


_GAP = 0.1
Z95 = 1.96  # of a 95% interval


def gap_problem(rows: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Find whether the last evaluation in ``rows`` (of metrics.jsonl) shows a confidence that holds in training alone.

    Compares confidence minus accuracy of the held-out questions with that of the :data:`NO_SIGNAL_STEPS` steps up to
    the evaluation, on questions at first sight and on repeated ones.  Returns text for the user by the code
    ``held_out_gap`` if a difference exceeds 0.1 with its 95% interval.
    """
    last = max((i for i, row in enumerate(rows) if Gap.of([row], HELD_OUT)), default=None)
    if last is None or (held_out := Gap.of([rows[last]], HELD_OUT)) is None:
        return {}
    recent = rows[max(0, last + 1 - NO_SIGNAL_STEPS) : last + 1]
    differences = []
    for name, title in ((FIRST_SIGHT, "at first sight"), (REPEATED, "asked before")):
        if (gap := Gap.of(recent, name)) is not None:
            difference = held_out.difference - gap.difference
            half = Z95 * math.hypot(held_out.error, gap.error)
            if abs(difference) - half > _GAP:
                interval = f"{difference - half:+.2f} to {difference + half:+.2f}"
                differences.append(
                    f"{gap.difference:+.2f} on questions {title} (difference {difference:+.2f}, {interval})"
                )
    if not differences:
        return {}
    times = [row[TIMES_ASKED] for row in recent if _known(row.get(TIMES_ASKED))]
    asked = f"; this run has asked a question {times[-1]:.1f} times on average" if times else ""
    return {
        "held_out_gap": "the confidence does not hold on new questions: stated minus right is "
        f"{held_out.difference:+.2f} on held-out questions and {' and '.join(differences)} in the rollout{asked}; "
        "train on more different questions, or fit a calibration map"
    }


class HealthWarnings:
    """Warns when a problem appears, and again when it returns after :data:`NO_SIGNAL_STEPS` steps without it.

    The first steps are judged as those of a trial, and the gap of log-probs in each step.
    """

    def __init__(self) -> None:
        self._recent: deque[Mapping[str, Any]] = deque(maxlen=NO_SIGNAL_STEPS)
        self._last_seen: dict[str, int] = {}
        self._gap: dict[str, str] = {}  # of the last evaluation; it stands until the next

    def after_step(self, step: int, metrics: Mapping[str, Any], method: TrainingMethod | None = None) -> str | None:
        """Add the metrics of ``step`` (from 1) and return a warning, or None if no problem is new.

        ``method``: see :func:`health_problems`.
        """
        self._recent.append(dict(metrics))
        problems = gap_of_log_probs([metrics])
        if len(self._recent) == _FIRST_STEPS:
            problems |= start_problems(self._recent)
        if len(self._recent) == NO_SIGNAL_STEPS:
            if Gap.of([metrics], HELD_OUT) is not None:
                self._gap = gap_problem(list(self._recent))
            problems |= health_problems(self._recent, method) | self._gap
        new = [
            text
            for code, text in problems.items()
            if step - self._last_seen.get(code, -NO_SIGNAL_STEPS) > NO_SIGNAL_STEPS
        ]
        self._last_seen |= dict.fromkeys(problems, step)
        if not new:
            return None
        steps = f"steps {step - len(self._recent) + 1} to {step}"
        return f"warning: {steps}: {'; '.join(new)} (see docs/troubleshooting.md)"


def _mean(rows: Sequence[Mapping[str, Any]], name: str) -> float:
    """The mean of a metric over the rows in which it is known; NaN, for which every comparison is false, if none."""
    values = [float(row[name]) for row in rows if _known(row.get(name))]
    return sum(values) / len(values) if values else math.nan
