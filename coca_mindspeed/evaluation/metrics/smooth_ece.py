"""Calibration error without bins (Blasiok and Nakkiran, 2023)."""

import numpy as np

from coca_mindspeed.evaluation.metrics.weighted import Floats

_GRID = 1000


def smooth_ece(values: Floats, counts: Floats, right: Floats) -> float:
    """Calibration error smoothed by a Gaussian kernel that is reflected at 0 and 1.

    The width is the one that equals the error that it gives, so there is nothing to choose.  NaN where no answer has a
    confidence.

    Args:
        values: distinct confidences (g,).
        counts: answers that state each (g,).
        right: of them right (g,).
    """
    if not len(values):
        return float("nan")
    places = np.minimum((values * _GRID).astype(np.intp), _GRID - 1)
    residual = np.bincount(places, weights=right - values * counts, minlength=_GRID) / counts.sum()
    # Reflected at both ends, a function on [0, 1] has period 2; smoothing damps each of its frequencies f = k / 2.
    spectrum = np.fft.rfft(np.concatenate([residual, residual[::-1]]))
    decay = -((np.pi * np.arange(len(spectrum))) ** 2) / 2

    def smoothed(width: float) -> float:
        damped = np.fft.irfft(spectrum * np.exp(decay * width**2), 2 * _GRID)
        return float(np.abs(damped[:_GRID]).sum())

    low, high = 1e-3, 1.0
    for _ in range(20):  # the error falls as the width grows, so the two meet once
        width = (low + high) / 2
        low, high = (width, high) if smoothed(width) > width else (low, width)
    return smoothed((low + high) / 2)
