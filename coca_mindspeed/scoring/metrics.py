"""Metrics of a rollout: weighted means over its responses and groups, and by first sight of a question."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from coca_mindspeed.evaluation.metrics import calibration_metrics

if TYPE_CHECKING:
    from torch import Tensor

    from coca_mindspeed.scoring.rollout import Credited, Scored


class WeightedMean(NamedTuple):
    """A mean over ``weight`` entries; NaN over none."""

    value: float
    weight: float


def weighted_means(parts: Iterable[Mapping[str, WeightedMean]]) -> dict[str, WeightedMean]:
    """The means over all entries of several parts; a metric may be missing in some of them."""
    sums: dict[str, tuple[float, float]] = {}
    for name, (value, weight) in (item for part in parts for item in part.items()):
        total, count = sums.get(name, (0.0, 0.0))
        sums[name] = (total + value * weight if weight else total, count + weight)
    return {name: WeightedMean(total / n if n else math.nan, n) for name, (total, n) in sums.items()}


def rollout_metrics(credited: Credited) -> dict[str, WeightedMean]:
    """Metrics of a rollout, each with its weight; rewards and accuracy are over the gradable answers."""
    scored, credit = credited.scored, credited.credit
    correct_B, stated_B, kept_P, reward_PG = scored.correct, scored.stated, credit.kept, credit.confidence_reward
    graded_B = ~correct_B.isnan()
    ends_BS = scored.segment_ends.double()
    lengths = dict(zip(credit.segments, ends_BS.diff(dim=1, prepend=ends_BS.new_zeros(len(ends_BS), 1)).T, strict=True))
    every, n_graded, n_kept = correct_B.numel(), int(graded_B.sum()), int(kept_P.sum())
    accuracy = float(correct_B[graded_B].mean())
    means: dict[str, tuple[float, float]] = {
        "grading/ungradable_share": (_share(~graded_B), every),
        "rollout/invalid_share": (_share(stated_B.isnan()), every),
        "response/length": (float(ends_BS[:, -1].mean()), every),
        **{f"response/{segment}_length": (float(own.mean()), every) for segment, own in lengths.items()},
        **_thought_metrics(credited),
        "rollout/confidence": (float(stated_B.nanmean()), int((~stated_B.isnan()).sum())),
        "reward/answer": (accuracy, n_graded),
        "rollout/accuracy": (accuracy, n_graded),
        CONFIDENCE_REWARD: (float(reward_PG.nanmean()), int((~reward_PG.isnan()).sum())),
        **confidence_metrics(scored),
        "group/dropped_share": (_share(~kept_P), len(kept_P)),
        "rollout/gesr": (float(credit.gesr.nanmean()), n_kept),
        **{
            f"group/no_{segment}_variance_share": (_share(~advantage.varies[kept_P]), n_kept)
            for segment, advantage in credit.segments.items()
            if advantage is not None
        },
    }
    if credit.deviation:
        means["advantage/deviation"] = (credit.deviation, 1)
    return _defined(means)


def _thought_metrics(credited: Credited) -> dict[str, tuple[float, float]]:
    """Tokens of the thoughts, without a confidence that begins them, and the share of thoughts that do not end."""
    scored = credited.scored
    if scored.thought_ends is None:
        return {}
    starts_B = scored.segment_ends[:, 0] if next(iter(credited.credit.segments)) == "confidence" else 0
    is_open_B = scored.thought_ends == 0
    lengths_B = (scored.lengths.where(is_open_B, scored.thought_ends) - starts_B).clamp(min=0).double()
    n = len(lengths_B)
    return {
        "response/thought_length": (float(lengths_B.mean()), n),
        "response/open_thought_share": (_share(is_open_B), n),
    }


def confidence_metrics(scored: Scored) -> dict[str, WeightedMean]:
    """ECE, AUROC and Brier score of the graded responses; the first two are no means of those of a rollout's parts."""
    graded_B = ~scored.correct.isnan()
    means: dict[str, tuple[float, float]] = {}
    for stated, suffix in ((scored.stated, ""), (scored.stated_after, "_after")):
        if stated is not None:
            measured = calibration_metrics(stated[graded_B].numpy(), scored.correct[graded_B].bool().numpy())
            found = {name: measured.values[name] for name in ("ece", "auroc", "brier")}
            means |= {f"rollout/{name}{suffix}": (value, measured.n_valid) for name, value in found.items()}
    return _defined(means)


def _defined(means: Mapping[str, tuple[float, float]]) -> dict[str, WeightedMean]:
    """Means by name; an undefined one, e.g. AUROC where all answers are right, has no weight."""
    return {name: WeightedMean(value, 0 if math.isnan(value) else weight) for name, (value, weight) in means.items()}


LOG_PROB_GAP = "rollout/log_prob_gap"
CONFIDENCE_REWARD = "reward/confidence"  # computed for every method; RLVR trains without it
TIMES_ASKED = "rollout/times_asked"  # how often the run has asked a question so far, on average
FIRST_SIGHT, REPEATED, HELD_OUT = "first_sight", "repeated", "held_out"


def gap_metrics(name: str, correct: Tensor, stated: Tensor) -> dict[str, WeightedMean]:
    """Accuracy and mean stated confidence of the responses with a graded answer and a valid confidence.

    Returns ``accuracy``, ``confidence``, and ``gap_error``: the standard error of confidence minus accuracy, by
    question.  Their names begin with ``name/``.  ``correct`` and ``stated`` are float64 ``[P, G]``, NaN where
    ungradable or invalid.
    """
    usable_PG = ~(correct.isnan() | stated.isnan())
    difference_N = stated[usable_PG] - correct[usable_PG]
    n, questions = difference_N.numel(), int(usable_PG.any(dim=1).sum())
    error = math.nan
    if questions > 1:
        by_question_P = (stated - correct - difference_N.mean()).where(usable_PG, 0).sum(dim=1)
        error = math.sqrt(float((by_question_P**2).sum()) * questions / (questions - 1)) / n
    found = {
        "accuracy": float(correct[usable_PG].mean()),
        "confidence": float(stated[usable_PG].mean()),
        "gap_error": error,
    }
    return {f"{name}/{key}": WeightedMean(value, 0 if math.isnan(value) else n) for key, value in found.items()}


def sight_metrics(scored: Scored, seen: Sequence[bool]) -> dict[str, WeightedMean]:
    """:func:`gap_metrics` of the questions that the run asks for the first time, and of those it asked before.

    ``seen``, ``[P]``: whether an earlier step asked the question.
    """
    correct_PG, stated_PG = (values.view(len(seen), -1) for values in (scored.correct, scored.stated))
    new = [p for p, known in enumerate(seen) if not known]
    asked = [p for p, known in enumerate(seen) if known]
    return {
        **gap_metrics(FIRST_SIGHT, correct_PG[new], stated_PG[new]),
        **gap_metrics(REPEATED, correct_PG[asked], stated_PG[asked]),
    }


def cut_off(token_ids: Tensor, lengths: Tensor, most: int, ends: Sequence[int]) -> Tensor:
    """Which responses were cut off, bool ``[B]``: they have ``most`` tokens, and the last is none of ``ends``.

    ``token_ids`` is int ``[B, T]``, ``lengths`` int ``[B]``.
    """
    if not token_ids.shape[1]:
        return lengths >= most
    last_B = token_ids.gather(1, (lengths.clamp(min=1) - 1)[:, None])[:, 0]
    return (lengths >= most) & ~sum((last_B == end for end in ends), start=lengths < 0)


def _share(where: Tensor) -> float:
    return float(where.double().mean())


def values(metrics: Mapping[str, WeightedMean]) -> dict[str, float]:
    """The values alone, NaN where undefined."""
    return {name: mean.value for name, mean in metrics.items()}
