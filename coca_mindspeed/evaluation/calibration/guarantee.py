"""The largest set of accepted answers whose error can be certified from labels.

For a threshold t, the answers with a stated confidence of at least t are accepted.  The number of wrong ones among m
accepted, labelled answers is binomial, so ``P(Bin(m, risk) <= wrong)`` is an exact p-value of "the error above t is
more than ``risk``".  Thresholds are tested from the top down on a grid of hundredths (fixed-sequence testing): a test
that passes hands its level on to the next, and the first that fails ends a run.  There are two starts, at the first
threshold that accepts 10 or 30% of the answers, each with half of the level (the fallback procedure of Wiens, 2003,
which bounds the chance of any false certificate): a few overconfident answers at the top then do not prevent a
certificate further down, however many labels show them.  The starts depend on the confidences and not on the labels.
"""

import math
from typing import Any

import numpy as np
import numpy.typing as npt
from pydantic import Field
from scipy.stats import beta, binom

from coca_mindspeed.config.schema import Section

GRID = 100
_STARTS = ((0.1, 0.5), (0.3, 0.5))  # share of the answers that is accepted, share of the level
_MOST_LABELS = 1 << 30  # times those that there are: nobody labels more


class Certificate(Section):
    """What was certified, or why nothing was.

    Attributes are fields of the JSON file; ``threshold`` is null where no set of answers could be certified.
    """

    risk: float = Field(gt=0, lt=1, description="largest error that is allowed")
    confidence: float = Field(gt=0, lt=1, description="of the guarantee, over draws of the labels")
    threshold: float | None = Field(description="accept stated confidences from here on; null: none is certified")
    labels: int = Field(ge=0, description="labelled answers, invalid confidences included")
    accepted: int = Field(ge=0, description="of them at or above the threshold")
    wrong: int = Field(ge=0, description="of the accepted")
    bound: float | None = Field(description="exact upper bound of the accepted answers' error")
    labels_needed: int | None = Field(
        description="where nothing is certified: how many would do if the shares stay; null: no number would"
    )

    def sentence(self) -> str:
        """For people."""
        if self.threshold is not None:
            return (
                f"certified: answers of stated confidence {self.threshold:g} or more are wrong at most "
                f"{self.risk:.3g} of the time, with confidence {self.confidence:g} ({self.wrong} of {self.accepted} "
                f"accepted labels wrong; {self.accepted / self.labels:.1%} of all are accepted)"
            )
        needed = (
            "no number of labels would do while the errors stay as they are"
            if self.labels_needed is None
            else f"about {self.labels_needed:,} labels would do if the shares stay as they are"
        )
        return f"nothing is certified at risk {self.risk:g} from {self.labels} labels; {needed}"


def p_value(wrong: npt.ArrayLike, accepted: npt.ArrayLike, risk: float) -> npt.NDArray[np.float64]:
    """Chance of so few wrong ones or fewer if the error were ``risk``: exact binomial tail, elementwise."""
    return np.asarray(binom.cdf(wrong, accepted, risk))


def upper_bound(wrong: int, accepted: int, confidence: float) -> float:
    """Exact one-sided (Clopper-Pearson) upper bound of the error."""
    return 1.0 if wrong >= accepted else float(beta.ppf(confidence, wrong + 1, accepted - wrong))


def least_labels(risk: float, confidence: float) -> int:
    """How many accepted labels without an error the guarantee needs at least."""
    return math.ceil(round(math.log(1 - confidence) / math.log(1 - risk), 9))


def certify(
    stated: npt.NDArray[np.float64],
    correct: npt.NDArray[np.bool_],
    *,
    risk: float,
    confidence: float,
    estimate_labels: bool = True,
) -> Certificate:
    """Test from each start down.

    Args:
        stated: confidences (n,), NaN where invalid; those are never accepted.
        correct: labels (n,), independent draws from what is to be served.
        risk: largest error that is allowed among the accepted.
        confidence: of the guarantee.
        estimate_labels: whether to say how many labels would do, where nothing is certified.
    """
    thresholds = np.arange(GRID, -1, -1) / GRID
    accepted, wrong = _counts(stated, correct, thresholds)
    found = _last_passed(accepted, wrong, risk, confidence)
    common: dict[str, Any] = {"risk": risk, "confidence": confidence, "labels": len(correct)}
    if found is None:
        needed = _labels_needed(accepted, wrong, len(correct), risk, confidence) if estimate_labels else None
        return Certificate(**common, threshold=None, accepted=0, wrong=0, bound=None, labels_needed=needed)
    m, k = int(accepted[found]), int(wrong[found])
    return Certificate(
        **common,
        threshold=float(thresholds[found]),
        accepted=m,
        wrong=k,
        bound=upper_bound(k, m, confidence),
        labels_needed=None,
    )


def _counts(
    stated: npt.NDArray[np.float64], correct: npt.NDArray[np.bool_], thresholds: npt.NDArray[np.float64]
) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
    """Accepted and wrong answers at each threshold."""
    valid = ~np.isnan(stated)

    def at_or_above(values: npt.NDArray[np.float64]) -> npt.NDArray[np.intp]:
        return len(values) - np.searchsorted(np.sort(values), thresholds, side="left")

    return at_or_above(stated[valid]), at_or_above(stated[valid & ~correct])


def _levels(accepted: npt.NDArray[np.intp], risk: float, confidence: float) -> npt.NDArray[np.float64]:
    """The level with which each threshold starts a run; zero where none starts."""
    levels = np.zeros(len(accepted))
    least = least_labels(risk, confidence)
    if accepted[-1] < 2 * least:  # one start with the whole level: less than it certifies nothing
        if accepted[-1] >= least:
            levels[np.argmax(accepted >= least)] = 1 - confidence
        return levels
    for share, weight in _STARTS:
        # With the least that can pass, one wrong answer would end the run at its start.
        wanted = max(2 * least, share * accepted[-1])
        levels[np.argmax(accepted >= wanted)] += weight * (1 - confidence)
    return levels


def _last_passed(
    accepted: npt.NDArray[np.intp], wrong: npt.NDArray[np.intp], risk: float, confidence: float
) -> int | None:
    """The last threshold that passes; None where none does."""
    found, level = None, 0.0
    p_values = p_value(wrong, accepted, risk)
    for index, start in enumerate(_levels(accepted, risk, confidence)):
        level += start
        if level > 0 and p_values[index] <= level * (1 + 1e-12):
            found = index
        else:
            level = 0.0
    return found


def _labels_needed(
    accepted: npt.NDArray[np.intp], wrong: npt.NDArray[np.intp], labels: int, risk: float, confidence: float
) -> int | None:
    """How many labels of the shares that were seen would certify, by the same test; None where none would."""
    if not accepted[-1]:
        return None

    share = np.divide(wrong, accepted, out=np.zeros(len(wrong)), where=accepted > 0)

    def passes(size: int) -> bool:
        scaled = accepted * size // labels
        return _last_passed(scaled, np.floor(share * scaled).astype(np.intp), risk, confidence) is not None

    low, high = labels, labels + 1
    while not passes(high):
        low, high = high, 2 * high
        if high > min(_MOST_LABELS * labels, np.iinfo(np.int64).max // labels):
            return None
    while low + 1 < high:
        middle = (low + high) // 2
        low, high = (low, middle) if passes(middle) else (middle, high)
    return high
