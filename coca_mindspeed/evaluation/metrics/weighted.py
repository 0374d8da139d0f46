"""Metrics of weighted predictions, for many weightings at once.

A bootstrap replicate is the same predictions with other whole-number weights, so one kernel computes the estimate (all
weights 1) and every replicate.  Predictions are sorted by confidence once; the rest is prefix sums over the G distinct
confidence values, along the last axis of arrays (r, G) for r weightings.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.special import ndtr

from coca_mindspeed.evaluation.metrics import binning
from coca_mindspeed.evaluation.metrics.binning import BinScheme, BinsClosed, Floats
from coca_mindspeed.evaluation.metrics.specs import CONFIDENCE_METRICS

# Confidences are clipped in the log score, which would be infinite for a wrong answer of confidence 1.
LOG_EPSILON = 1e-6


@dataclass(frozen=True, slots=True)
class MetricOptions:
    """How the metrics are computed.

    Attributes:
        scheme: ``equal_width`` (the paper's tables) or ``equal_mass`` bins, for ECE and MCE.
        closed: the side on which a bin includes its edge.
        debias: subtract the noise of each bin, E|N(gap, sd^2)| - |gap|, from ECE (Kumar, Liang and Ma, 2019).
        coverages: fractions of most confident answers for selective accuracy.
    """

    bins: int = 10
    scheme: BinScheme = "equal_width"
    closed: BinsClosed = "right"
    debias: bool = False
    coverages: tuple[float, ...] = (0.25, 0.5, 0.75)

    def __post_init__(self) -> None:
        if not all(0 < coverage <= 1 for coverage in self.coverages):
            raise ValueError(f"coverages should lie in (0, 1], found {self.coverages}")

    @property
    def bins_text(self) -> str:
        """The bins as named in tables: ``10 equal-width bins closed on the right``."""
        return f"{self.bins} {self.scheme.replace('_', '-')} bins closed on the {self.closed}"


def harmonic_numbers(up_to: int) -> Floats:
    """Return H_0 = 0, H_1 = 1, ..., H_k = 1 + 1/2 + ... + 1/k; shape (up_to + 1,)."""
    return np.concatenate([[0.0], np.cumsum(1 / np.arange(1, up_to + 1))])


def _dot(rows: Floats, vector: Floats) -> Floats:
    """Product (r,) of (r, n) and (n,), without the threads that BLAS would start."""
    return np.asarray(np.einsum("rn,n->r", rows, vector))


def coverage_name(coverage: float) -> str:
    """Return the name of selective accuracy at a coverage: ``accuracy_at_0.5``."""
    return f"accuracy_at_{coverage:g}"


def coverage_of(name: str) -> float | None:
    """Return the coverage of a selective-accuracy metric; None for other metrics."""
    prefix, _, coverage = name.partition("accuracy_at_")
    return float(coverage) if coverage and not prefix else None


class WeightedSample:
    """Predictions prepared for :meth:`metrics`; arguments as in :func:`.calibration.calibration_metrics`."""

    def __init__(
        self,
        confidence: npt.NDArray[Any],
        correct: npt.NDArray[np.bool_],
        tokens_to_confidence: npt.NDArray[Any] | None,
        options: MetricOptions,
    ) -> None:
        binning.check_confidence(confidence)
        if correct.dtype != np.bool_:
            raise TypeError(f"correct should be bool, found {correct.dtype}")
        shapes = {"confidence": confidence.shape, "correct": correct.shape}
        if tokens_to_confidence is not None:
            shapes["tokens_to_confidence"] = tokens_to_confidence.shape
        if len(set(shapes.values())) > 1:
            raise ValueError(f"arrays should have one length, found {shapes}")
        self.options = options
        # Descending confidence; NaN sorts last, so the valid predictions are the first n_valid.
        self.order = np.argsort(-confidence, kind="stable")
        self.n, self.n_valid = len(confidence), int(np.count_nonzero(~np.isnan(confidence)))
        self.correct = correct[self.order].astype(np.float64)
        tokens = np.full(self.n, np.nan) if tokens_to_confidence is None else tokens_to_confidence[self.order]
        known = ~np.isnan(tokens)
        self.tokens_known = known.astype(np.float64) if known.any() else None
        self.tokens = np.nan_to_num(tokens.astype(np.float64))
        ordered = confidence[self.order[: self.n_valid]]
        is_first = np.ones(self.n_valid, dtype=np.bool_)
        is_first[1:] = ordered[1:] != ordered[:-1]
        self.group_starts = np.flatnonzero(is_first)
        self.group_counts = np.diff(np.append(self.group_starts, self.n_valid)).astype(np.float64)
        values = ordered[self.group_starts]
        edges = binning.bin_edges(ordered, options.bins, options.scheme, options.closed)
        groups_bin = binning.bin_index(values, edges, options.closed)
        self.bin_starts = np.flatnonzero(np.diff(groups_bin, prepend=-1))
        self.bin_ends = np.append(self.bin_starts, len(values))[1:] - 1
        self.values = values.astype(np.float64)
        kept = np.clip(self.values, LOG_EPSILON, 1 - LOG_EPSILON)
        self.loss_if_right, self.loss_if_wrong = -np.log(kept), -np.log1p(-kept)
        self.harmonic = harmonic_numbers(self.n)

    def group_right(self) -> Floats:
        """Correct answers of each distinct confidence (G,)."""
        if not self.n_valid:
            return np.zeros(0)
        return np.asarray(np.add.reduceat(self.correct[: self.n_valid], self.group_starts))

    def bin_sums(self) -> tuple[Floats, Floats, Floats]:
        """Answers, correct answers and sum of confidences of each non-empty bin, (bins,) each."""
        if not self.n_valid:
            return np.zeros(0), np.zeros(0), np.zeros(0)
        sums = (self.group_counts, self.group_right(), self.group_counts * self.values)
        count, of_them_right, stated = (np.add.reduceat(each, self.bin_starts) for each in sums)
        return count, of_them_right, stated

    def metrics(self, weights: Floats) -> dict[str, Floats]:
        """Compute every metric (r,) under each weighting; NaN where undefined.

        Args:
            weights: whole numbers (r, n), column j for prediction ``order[j]``.
        """
        total = weights.sum(axis=1)
        # Questions are resampled with all their samples, so a replicate may be larger than the sample.
        if (largest := int(total.max(initial=0))) >= len(self.harmonic):
            self.harmonic = harmonic_numbers(largest)
        with np.errstate(invalid="ignore", divide="ignore"):
            result = {"accuracy": _dot(weights, self.correct) / total}
            result["tokens_to_confidence"] = (
                np.full(len(weights), np.nan)
                if self.tokens_known is None
                else _dot(weights, self.tokens) / _dot(weights, self.tokens_known)
            )
            calibration = self._calibration(weights[:, : self.n_valid])
            return result | {"success_rate": calibration.pop("count") / total} | calibration

    def _calibration(self, weights: Floats) -> dict[str, Floats]:
        """Metrics of the valid predictions, and their count; weights (r, n_valid) in descending confidence."""
        if self.n_valid == 0:
            names = (*CONFIDENCE_METRICS, *map(coverage_name, self.options.coverages))
            undefined: dict[str, Floats] = {name: np.full(len(weights), np.nan) for name in names}
            return undefined | {"count": np.zeros(len(weights))}
        right = weights * self.correct[: self.n_valid]
        if len(self.group_starts) < self.n_valid:
            right = np.add.reduceat(right, self.group_starts, axis=1)  # (r, G)
            weights = np.add.reduceat(weights, self.group_starts, axis=1)  # (r, G)
        accepted, accepted_right = np.cumsum(weights, axis=1), np.cumsum(right, axis=1)  # (r, G)
        n, n_right = accepted[:, -1], accepted_right[:, -1]  # (r,)
        wrong = weights - right
        # Pairs in which the wrong answer ranks above the correct one; within a group, half of the pairs.
        misranked = np.einsum("rg,rg->r", right, accepted) - np.einsum("rg,rg->r", right, accepted_right)
        misranked -= np.einsum("rg,rg->r", right, wrong) / 2
        result = {"count": n, "auroc": 1 - misranked / (n_right * (n - n_right))}
        result |= self._binned(weights, accepted, accepted_right)
        frequency = right / np.maximum(weights, 1)  # (r, G), 0 where a group has no weight
        squares = _dot(weights, self.values**2) - 2 * _dot(right, self.values)  # (r,), sum of s^2 - 2 s y
        grouped = np.einsum("rg,rg->r", right, frequency)  # (r,), sum of each group's frequency^2
        base_rate = n_right / n
        result["brier"] = (squares + n_right) / n
        result["reliability"] = (squares + grouped) / n
        result["resolution"] = grouped / n - base_rate**2
        result["uncertainty"] = base_rate * (1 - base_rate)
        result["log_score"] = (_dot(right, self.loss_if_right) + _dot(wrong, self.loss_if_wrong)) / n
        result["aurc"] = self._aurc(accepted, frequency, n_right)
        result["excess_aurc"] = result["aurc"] - self._best_aurc(n, n_right)
        running = np.cumsum((weights * self.values - right)[:, ::-1], axis=1)  # ascending confidence
        result["ks"] = np.abs(running).max(axis=1) / n
        return result | self._selective(accepted, accepted_right)

    def _aurc(self, accepted: Floats, frequency: Floats, n_right: Floats) -> Floats:
        """Expected mean risk over all places, with ties in random order.

        A correct answer at place j is accepted for every k >= j, and so adds 1/j + ... + 1/n = H_n - H_(j-1) to the
        sum of the accuracies of the k most confident.  In a group that fills places a+1 to b, the sum of H_(j-1) over
        its places is S_b - S_a with S_b = b H_b - b, and the fraction f of them is correct.
        """
        places = accepted.astype(np.intp)
        sums = places * (np.take(self.harmonic, places) - 1)
        sums[:, 1:] -= sums[:, :-1].copy()
        n = accepted[:, -1]
        return np.asarray(1 - (self.harmonic[places[:, -1]] * n_right - np.einsum("rg,rg->r", frequency, sums)) / n)

    def _best_aurc(self, n: Floats, n_right: Floats) -> Floats:
        """AURC with all correct answers first: k accepted answers include max(0, k - n_right) wrong ones."""
        tail = np.take(self.harmonic, n.astype(np.intp)) - np.take(self.harmonic, n_right.astype(np.intp))
        return np.asarray((n - n_right - n_right * tail) / n)

    def _binned(self, weights: Floats, accepted: Floats, accepted_right: Floats) -> dict[str, Floats]:
        """ECE and MCE; bin counts are differences of the running counts (r, G)."""
        n = accepted[:, -1]
        count = np.diff(accepted[:, self.bin_ends], axis=1, prepend=0)  # (r, bins that are not empty)
        accuracy = np.diff(accepted_right[:, self.bin_ends], axis=1, prepend=0) / count
        gap = np.abs(np.add.reduceat(weights * self.values, self.bin_starts, axis=1) / count - accuracy)
        gap, accuracy = np.nan_to_num(gap), np.nan_to_num(accuracy)  # a replicate may leave a bin empty
        error = gap
        if self.options.debias:
            deviation = np.sqrt(accuracy * (1 - accuracy) / np.maximum(count, 1))
            z = gap / np.where(deviation > 0, deviation, 1)
            density = np.exp(-(z**2) / 2) / np.sqrt(2 * np.pi)
            expected = deviation * 2 * density + gap * (1 - 2 * ndtr(-z))
            error = np.where(deviation > 0, 2 * gap - expected, gap)
        ece = np.einsum("rb,rb->r", count, error) / n
        return {
            "ece": np.maximum(ece, 0.0) if self.options.debias else ece,
            "mce": np.where(n > 0, gap.max(axis=1), np.nan),
        }

    def _selective(self, accepted: Floats, accepted_right: Floats) -> dict[str, Floats]:
        """Accuracy of the most confident answers, from running counts (r, G)."""
        zeros = np.zeros((len(accepted), 1))
        accepted, accepted_right = np.hstack([zeros, accepted]), np.hstack([zeros, accepted_right])
        result = {}
        for coverage in self.options.coverages:
            # Rounded, so that 0.29 * 100 is 29 and not 29.000000000000004.
            places = np.ceil(np.round(coverage * accepted[:, -1], 9))
            expected = [np.interp(*row) for row in zip(places, accepted, accepted_right, strict=True)]
            result[coverage_name(coverage)] = np.array(expected) / places
        return result
