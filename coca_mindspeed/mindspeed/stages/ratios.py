"""Metrics as numbers that MindSpeed-RL's loggers can average over batches and nodes.

MindSpeed-RL averages every list of values under a key.  Ratios that must not be averaged (clip fractions, lengths of
segments over different numbers of tokens) travel as numerator and denominator and are divided at the end, by
:func:`finish`: means over the same number of entries divide to the same ratio as the sums.
"""

from collections.abc import Mapping

from coca_mindspeed.judging.batch_metrics import Mean

_NUMERATOR, _DENOMINATOR = "/numerator", "/denominator"


def ratio(name: str, numerator: float, denominator: float) -> dict[str, float]:
    """A ratio in two entries, for :func:`finish` to divide."""
    return {name + _NUMERATOR: numerator, name + _DENOMINATOR: denominator}


def finish(metrics: Mapping[str, float]) -> dict[str, float]:
    """Divide the ratios; one without a denominator is undefined and left out."""
    finished = {k: v for k, v in metrics.items() if not k.endswith((_NUMERATOR, _DENOMINATOR))}
    for key, numerator in metrics.items():
        if key.endswith(_NUMERATOR):
            name = key.removesuffix(_NUMERATOR)
            if denominator := metrics[name + _DENOMINATOR]:
                finished[name] = numerator / denominator
    return finished


def as_ratios(metrics: Mapping[str, Mean]) -> dict[str, float]:
    """Means as ratios, so that those of several batches divide to the mean over all of their entries."""
    return {
        entry: number
        for name, mean in metrics.items()
        for entry, number in ratio(name, mean.value * mean.weight if mean.weight else 0.0, mean.weight).items()
    }
