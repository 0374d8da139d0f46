"""The study of the group's deviation: its measures, and its rule."""

import numpy as np
import pytest

from coca_mindspeed.algorithm.methods import method_settings
from experiments.deviation import differences, measures
from experiments.forms import FormRun, by_form


def training(name, seed, stated, right=(4, 1)):
    """Ten answers to each of two kinds of questions, of which ``2 right`` are right; the last of each is invalid."""
    kinds = np.repeat(["1+2", "2*2"], 10)
    correct = np.concatenate([np.arange(10) < 2 * count for count in right])
    confidence = np.repeat(np.array(stated, float), 10)
    confidence[9::10] = np.nan
    return FormRun(name, seed, method_settings(), {}, kinds, confidence, correct)


def test_measures_by_hand():
    assert measures(training("rlcr, none", 0, (0.9, 0.3))) == pytest.approx(
        {"gap": 0.6 - 10 / 18, "excess": ((0.9 - 8 / 9) - (0.3 - 2 / 9)) / 2}
    )


@pytest.mark.parametrize(
    ("shifts", "right", "outcome"),
    [
        ((0.10, 0.11, 0.12), (4, 1), "overconfident by the division"),
        ((-0.10, -0.11, -0.12), (4, 1), "underconfident by the division"),
        ((0.001, -0.001, 0.002), (4, 1), "no difference"),
        ((0.3, -0.2, 0.1), (4, 1), "not decided"),
        ((0.10, 0.11), (4, 1), "not decided"),
        ((0.10, 0.11, 0.12), (0, 0), None),  # the answers got lost
    ],
)
def test_the_rule(shifts, right, outcome):
    runs = [training("rlcr, none", seed, (0.5, 0.2), right) for seed in range(len(shifts))]
    runs += [training("rlcr, group", seed, (0.5 + shift, 0.2 + shift)) for seed, shift in enumerate(shifts)]
    of_gap = differences(by_form(runs)).get(("rlcr", "gap"))
    assert (of_gap and of_gap[2]) == outcome
