"""Metrics that are means over predictions, with the variance over questions.

A prediction's influence is how far it moves the estimate (times n): its deviation from the mean, or for AUROC the
deviation of its placement among the answers of the other class (DeLong, DeLong and Clarke-Pearson, 1988).  Influences
of the samples of one question are added before they are squared, so that samples which agree count once.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.stats import rankdata

from coca_mindspeed.evaluation.intervals.bounds import BoundedMean
from coca_mindspeed.evaluation.metrics.binning import Floats
from coca_mindspeed.evaluation.predictions import Outcomes

MEANS = ("accuracy", "success_rate", "brier", "auroc")


def question_index(questions: npt.NDArray[Any] | None, rows: int) -> npt.NDArray[np.intp]:
    """Return the number of each row's question (rows,), from 0; without ``questions`` every row has its own.

    Raises ValueError if the lengths differ.
    """
    if questions is None:
        return np.arange(rows)
    if len(questions) != rows:
        raise ValueError(f"questions should have length {rows}, found {len(questions)}")
    return np.asarray(np.unique(questions, return_inverse=True)[1], dtype=np.intp)


def independent_units(question: npt.NDArray[np.intp]) -> float:
    """Return the effective number of independent answers if all samples of a question agree: (sum k)^2 / sum k^2."""
    samples = np.unique(question, return_counts=True)[1].astype(np.float64)
    return float(samples.sum() ** 2 / (samples**2).sum()) if len(samples) else 0.0


@dataclass(frozen=True, slots=True)
class Influence:
    """A mean (NaN where undefined) and the influence ``moves`` (n,) of each prediction on it.

    ``units`` is the number of independent questions, ``most`` the number of answers if each is binary.
    """

    value: float
    moves: Floats
    units: float
    most: float | None = None

    def variance(self, question: npt.NDArray[np.intp]) -> float:
        """Variance of the mean, with each question's predictions taken together."""
        together = np.bincount(question, weights=self.moves)
        factor = len(together) / max(len(together) - 1, 1)
        return float((together**2).sum() / len(question) ** 2 * factor)

    def mean(self, question: npt.NDArray[np.intp]) -> BoundedMean:
        if math.isnan(self.value):
            return BoundedMean(math.nan, math.nan, 0.0)
        return BoundedMean(self.value, self.variance(question), self.units, self.most)


def influences(data: Outcomes, question: npt.NDArray[np.intp]) -> Mapping[str, Influence]:
    """Return the influences on every metric of :data:`MEANS`; ``question`` is the question of each prediction (n,)."""
    everywhere = np.ones(len(data), dtype=np.bool_)
    valid = ~np.isnan(data.confidence)
    right = data.correct.astype(np.float64)
    loss = np.where(valid, (data.confidence - right) ** 2, 0.0)
    return {
        "accuracy": _mean(right, everywhere, question, is_share=True),
        "success_rate": _mean(valid.astype(np.float64), everywhere, question, is_share=True),
        "brier": _mean(loss, valid, question),
        "auroc": _auroc(data, valid, question),
    }


def difference(first: Influence, second: Influence, question: npt.NDArray[np.intp]) -> BoundedMean:
    """Return ``second - first`` of two methods on the same predictions, row by row."""
    value = second.value - first.value
    if math.isnan(value):
        return BoundedMean(math.nan, math.nan, 0.0, lower=-1.0)
    units = min(first.units, second.units)
    both = Influence(value, second.moves - first.moves, units)
    return BoundedMean(value, both.variance(question), units, lower=-1.0)


def _mean(
    values: Floats, over: npt.NDArray[np.bool_], question: npt.NDArray[np.intp], *, is_share: bool = False
) -> Influence:
    count = int(over.sum())
    if not count:
        return Influence(math.nan, np.zeros(len(values)), 0.0)
    mean = float(values[over].mean())
    moves = np.where(over, (values - mean) * len(values) / count, 0.0)
    return Influence(mean, moves, independent_units(question[over]), float(count) if is_share else None)


def _auroc(data: Outcomes, valid: npt.NDArray[np.bool_], question: npt.NDArray[np.intp]) -> Influence:
    right, wrong = valid & data.correct, valid & ~data.correct
    n_right, n_wrong = int(right.sum()), int(wrong.sum())
    moves = np.zeros(len(data))
    if not n_right or not n_wrong:
        return Influence(math.nan, moves, 0.0)
    ranks = np.zeros(len(data))
    ranks[valid] = rankdata(data.confidence[valid])
    # Fraction of the other class below a correct answer, and above a wrong one; ties half.
    placed_right = (ranks[right] - rankdata(data.confidence[right])) / n_wrong
    placed_wrong = 1 - (ranks[wrong] - rankdata(data.confidence[wrong])) / n_right
    area = float(placed_right.mean())
    moves[right] = (placed_right - area) * len(data) / n_right
    moves[wrong] = (placed_wrong - area) * len(data) / n_wrong
    # The variance is at most area (1 - area) / size of the rarer class (Birnbaum and Klose, 1957).
    return Influence(area, moves, min(independent_units(question[right]), independent_units(question[wrong])))
