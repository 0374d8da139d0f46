"""Where a policy's confidence settles that does not depend on the question; the figures of docs/reproduce.md.

The Brier score draws it to the mean success rate.  Divided by the deviation of its group it is another score: groups
count by which way they pull and hardly by how far, so the confidence is drawn towards the median.
"""

import pytest
import torch

from coca_mindspeed.algorithm.advantages import group_advantages

GROUPS, GROUP = 4_000, 8
NEVER_RIGHT, RATE_OF_OTHERS = 0.6, 0.8  # of ten groups six have no right answer; mean .32, median 0


def settles_at(eps, spread=0.2):
    """The centre from which advantages move a clipped normal's centre neither up nor down."""
    generator = torch.Generator().manual_seed(0)
    rates = (torch.arange(GROUPS) >= NEVER_RIGHT * GROUPS).double() * RATE_OF_OTHERS
    noise = torch.randn(GROUPS, GROUP, generator=generator, dtype=torch.float64)

    def push(centre):
        stated = (centre + spread * noise).clamp(0, 1)
        rewards = -(stated - rates[:, None]).square()
        return float((group_advantages(rewards, eps=eps).values * noise).mean())

    low, high = -1.0, 1.0
    while high - low > 1e-3:
        middle = (low + high) / 2
        low, high = (middle, high) if push(middle) > 0 else (low, middle)
    return float((low + spread * noise).clamp(0, 1).mean())


def test_a_larger_eps_draws_it_to_the_mean():
    for eps, settled in ((1e-6, 0.0), (0.05, 0.17), (0.5, 0.28), (1.0, 0.29)):
        assert settles_at(eps) == pytest.approx(settled, abs=0.02)


def test_without_a_deviation_it_is_the_mean_whatever_the_spread():
    for spread in (0.02, 0.1):
        assert settles_at(1.0, spread) == pytest.approx(0.32, abs=0.02)
