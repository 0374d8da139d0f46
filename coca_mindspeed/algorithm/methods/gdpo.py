"""GDPO (Liu et al., 2026, arXiv 2601.05242) with CoCA's rewards: each is normalised on its own, their sum is on every
token.

    A = A_c + A_a

It differs from ``joint`` in the normalisation alone, and from ``coca`` in the tokens alone.  verl and TRL have it under
this name; their last step, which whitens the sum over the batch, is left out for this comparison.
"""

from dataclasses import dataclass

from coca_mindspeed.algorithm.methods.base import GroupOutcomes, Normalisation, SegmentAdvantages
from coca_mindspeed.algorithm.methods.coca import Coca


@dataclass(frozen=True)
class Gdpo(Coca):
    """The sum of CoCA's two advantages."""

    name: str = "gdpo"

    def advantages(self, outcomes: GroupOutcomes, normalise: Normalisation, stage: str) -> SegmentAdvantages:
        own = super().advantages(outcomes, normalise, stage)
        return dict.fromkeys(own, own["confidence"] + own["answer"])
