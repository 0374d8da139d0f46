"""The ECE that a perfectly calibrated model would show with the same confidences.

Zero is not what good calibration looks like on a finite set: 30 calibrated answers show about 0.18.  Answers are drawn
again and again, each right with the probability that its confidence states, and measured like the real ones.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from coca_mindspeed.evaluation.intervals.bounds import Floats

# Numbers drawn at once: draws times distinct confidences.
_BLOCK = 1 << 18


@dataclass(frozen=True, slots=True)
class CalibratedEce:
    """ECE of redrawn answers.

    Attributes:
        draws: one for each redrawing (r,); NaN where no answer has a confidence.
    """

    draws: Floats

    @property
    def mean(self) -> float:
        return float(self.draws.mean())

    @property
    def high(self) -> float:
        """95 in a hundred calibrated models show less."""
        return float(np.quantile(self.draws, 0.95))

    def as_dict(self) -> dict[str, float | None]:
        """Strict JSON, None where undefined."""
        if bool(np.isnan(self.draws).any()):
            return {"mean": None, "p95": None}
        return {"mean": self.mean, "p95": self.high}


def calibrated_ece(
    values: Floats, counts: Floats, bin_starts: npt.NDArray[np.intp], *, draws: int = 1000, seed: int = 0
) -> CalibratedEce:
    """Redraw the answers.

    Args:
        values: distinct confidences (g,), those of one bin side by side.
        counts: answers that state each (g,).
        bin_starts: where each bin begins among them.
        draws: how many.
        seed: equal seeds give equal draws.
    """
    if not len(values):
        return CalibratedEce(np.full(draws, np.nan))
    rng, whole = np.random.default_rng(seed), counts.astype(np.int64)
    size = max(1, _BLOCK // len(values))
    alone, found = bool(whole.max() == 1), []
    for start in range(0, draws, size):
        shape = (min(size, draws - start), len(values))
        # A uniform draw is several times faster than a binomial one of a single answer.
        right = rng.random(shape) < values if alone else rng.binomial(whole, values, size=shape)
        gap = np.add.reduceat(right - whole * values, bin_starts, axis=1)
        found.append(np.abs(gap).sum(axis=1) / whole.sum())
    return CalibratedEce(np.concatenate(found))


def mean_calibrated(parts: Sequence[CalibratedEce]) -> CalibratedEce:
    """The plain mean over data sets, whose answers are drawn independently."""
    return CalibratedEce(np.mean([part.draws for part in parts], axis=0))
