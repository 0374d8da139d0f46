"""What ways of choosing a tier cost and how often they are right, setting by setting."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from coca_mindspeed.serving.replay import Floats, Tiers

_MOST_THRESHOLDS = 200


class Curve(NamedTuple):
    """A router's settings from cheap to dear, per question: correct (G, n), cost (G, n), asked the last tier (G, n)."""

    correct: Floats
    cost: Floats
    last: Floats


def thresholds_of(tiers: Tiers) -> Floats:
    """Thresholds (G,) worth trying: the stated confidences of all tiers but the last, and one above them all."""
    stated = np.unique(tiers.confidence[:-1][~np.isnan(tiers.confidence[:-1])])
    if len(stated) > _MOST_THRESHOLDS:
        stated = np.unique(np.quantile(stated, np.linspace(0, 1, _MOST_THRESHOLDS), method="nearest"))
    return np.append(stated, 2.0)


def threshold_curve(tiers: Tiers, *, answer_first: bool = False) -> Curve:
    """Stop at the first tier whose confidence reaches the threshold, the same for all tiers; the last one answers.

    Args:
        tiers: what they said.
        answer_first: pay for the whole response of every tier on the way.
    """
    thresholds = thresholds_of(tiers)
    shape = len(thresholds), tiers.correct.shape[1]
    correct, cost = np.zeros(shape), np.zeros(shape)
    going: npt.NDArray[np.bool_] = np.ones(shape, dtype=np.bool_)
    passing = tiers.whole if answer_first else tiers.opening
    for tier in range(len(tiers.names)):
        final = tier == len(tiers.names) - 1
        with np.errstate(invalid="ignore"):
            sure: npt.NDArray[np.bool_] = np.asarray(tiers.confidence[tier][None] >= thresholds[:, None])
        stops = going if final else going & sure
        correct[stops] = np.broadcast_to(tiers.correct[tier], shape)[stops]
        cost += np.where(stops, tiers.whole[tier], 0.0) + np.where(going & ~stops, passing[tier], 0.0)
        if final:
            return Curve(correct, cost, going.astype(np.float64))
        going = going & ~stops
    raise AssertionError("the last tier answers")


def single_curve(tiers: Tiers) -> Curve:
    """Each tier on its own; random routing is the straight line between two of them."""
    last = np.zeros(tiers.whole.shape)
    last[-1] = 1
    return Curve(tiers.correct.astype(np.float64), tiers.whole, last)


def oracle_curve(tiers: Tiers) -> Curve:
    """The cheapest tier that is right; where none is, the cheapest."""
    price = np.where(tiers.correct, tiers.whole, np.inf)
    any_right = np.asarray(tiers.correct.any(axis=0))
    chosen = np.where(any_right, price.argmin(axis=0), tiers.whole.argmin(axis=0))
    column = np.arange(len(chosen))
    return Curve(
        any_right[None].astype(np.float64),
        tiers.whole[chosen, column][None],
        (chosen == len(tiers.names) - 1)[None].astype(np.float64),
    )
