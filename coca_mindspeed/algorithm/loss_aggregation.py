"""Names of the ways to aggregate a loss over tokens; the schema imports them without torch."""

from typing import Literal

#: ``sum`` is the paper's; :func:`coca_mindspeed.algorithm.objective.segment_objective` says what each means.
LossAggregation = Literal["sum", "token_mean", "segment_mean"]
