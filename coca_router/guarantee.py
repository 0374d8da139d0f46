"""The largest set of accepted answers whose error can be certified from labels.

For a threshold t, answers with a stated confidence of at least t are accepted. The number of wrong ones among m
accepted, labelled answers is binomial, so ``P(Bin(m, risk) <= wrong)`` is an exact p-value of "the error above t
exceeds ``risk``". Thresholds are tested in descending order on a grid of hundredths (fixed-sequence testing): a test
that passes hands its level to the next, and the first failure ends a run. There are two starts, at the first
threshold that accepts 10 or 30% of the answers, each with half of the level (the fallback procedure of Wiens, 2003,
which bounds the probability of any false certificate), so that a few overconfident answers at the top do not prevent a
certificate further down. The starts depend on the confidences, not on the labels.
"""

import math
from typing import Any

import numpy as np
import numpy.typing as npt
from pydantic import Field
from scipy.special import betaincinv

from coca_mindspeed.config.schema import Section
from coca_mindspeed.evaluation.binning import Floats

GRID = 100
_STARTS = ((0.1, 0.5), (0.3, 0.5))  # fraction of the answers accepted, fraction of the level


class Certificate(Section):
    """Result of :func:`certify`, and fields of the JSON file; ``threshold`` is null where nothing is certified."""

    risk: float = Field(gt=0, lt=1, description="largest error that is allowed")
    confidence: float = Field(gt=0, lt=1, description="of the guarantee, over draws of the labels")
    threshold: float | None = Field(description="lowest accepted confidence; null: nothing is certified")
    labels: int = Field(ge=0, description="labelled answers, invalid confidences included")
    accepted: int = Field(ge=0, description="of them at or above the threshold")
    wrong: int = Field(ge=0, description="of the accepted")
    bound: float | None = Field(description="exact upper bound of the accepted answers' error")

    def sentence(self) -> str:
        if self.threshold is not None:
            return (
                f"certified: answers of confidence {self.threshold:g} or more are wrong at most "
                f"{self.risk:.3g} of the time, with confidence {self.confidence:g} ({self.wrong} of {self.accepted} "
                f"accepted labels wrong; {self.accepted / self.labels:.1%} of all are accepted)"
            )
        least = least_labels(self.risk, self.confidence)
        return (
            f"nothing is certified at risk {self.risk:g} from {self.labels} labels; even without a wrong one at least "
            f"{least} accepted labels are needed"
        )


def p_value(wrong: npt.ArrayLike, accepted: npt.ArrayLike, risk: float) -> Floats:
    """Exact binomial tail, elementwise: probability of at most ``wrong`` wrong answers if the error were ``risk``."""
    from scipy.stats import binom  # takes a second to import, which a refusal must not

    return np.asarray(binom.cdf(wrong, accepted, risk))


def upper_bound(wrong: int, accepted: int, confidence: float) -> float:
    """Exact one-sided (Clopper-Pearson) upper bound of the error."""
    return 1.0 if wrong >= accepted else float(betaincinv(wrong + 1, accepted - wrong, confidence))


def least_labels(risk: float, confidence: float) -> int:
    """Smallest number of accepted labels, all correct, that certifies."""
    return math.ceil(round(math.log(1 - confidence) / math.log(1 - risk), 9))


def certify(stated: Floats, correct: npt.NDArray[np.bool_], *, risk: float, confidence: float) -> Certificate:
    """Find the lowest threshold whose error is certified to be at most ``risk``, with probability ``confidence``.

    ``stated`` are confidences ``[n]``, NaN (never accepted) where invalid. The labels ``correct``, ``[n]``, are
    independent draws from the distribution that is served.
    """
    thresholds = np.arange(GRID, -1, -1) / GRID
    valid = ~np.isnan(stated)
    accepted, wrong = (  # at or above each threshold
        rows.sum() - np.searchsorted(np.sort(stated[rows]), thresholds, side="left")
        for rows in (valid, valid & ~correct)
    )
    last, level = None, 0.0
    p_values = p_value(wrong, accepted, risk)
    for index, start in enumerate(_levels(accepted, risk, confidence)):
        level += start
        if level > 0 and p_values[index] <= level * (1 + 1e-12):
            last = index
        else:
            level = 0.0
    common: dict[str, Any] = {"risk": risk, "confidence": confidence, "labels": len(correct)}
    if last is None:
        return Certificate(**common, threshold=None, accepted=0, wrong=0, bound=None)
    m, k = int(accepted[last]), int(wrong[last])
    bound, threshold = upper_bound(k, m, confidence), float(thresholds[last])
    return Certificate(**common, threshold=threshold, accepted=m, wrong=k, bound=bound)


def _levels(accepted: npt.NDArray[np.intp], risk: float, confidence: float) -> Floats:
    """Return the level with which each threshold starts a run; zero where none starts."""
    levels = np.zeros(len(accepted))
    least = least_labels(risk, confidence)
    if accepted[-1] < 2 * least:  # one start with the whole level: half of it would certify nothing
        if accepted[-1] >= least:
            levels[np.argmax(accepted >= least)] = 1 - confidence
        return levels
    for share, weight in _STARTS:
        # With the smallest number that can pass, one wrong answer would end the run at its start.
        wanted = max(2 * least, share * accepted[-1])
        levels[np.argmax(accepted >= wanted)] += weight * (1 - confidence)
    return levels
