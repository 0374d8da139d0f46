"""The paper as pure functions on tensors and strings, which all three engines call."""

from typing import Literal

#: How a loss is aggregated over tokens: ``sum`` is the paper's; see :func:`.objective.segment_objective`.
LossAggregation = Literal["sum", "token_mean", "segment_mean"]
