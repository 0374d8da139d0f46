"""verl's own loss, with clip fractions and KL of each segment among its metrics.

Value and gradient are verl's; ``algorithm.objective`` only gives the metrics.
"""

from collections.abc import MutableMapping
from typing import Any

import torch
from verl.utils.metric import AggregationType, Metric
from verl.workers.utils.losses import ppo_loss
from verl.workers.utils.padding import no_padding_2_padding

from coca_mindspeed.algorithm.advantages import segment_masks
from coca_mindspeed.algorithm.objective import segment_objective

#: The column of verl's queue with the tokens of each row up to the end of each segment, int ``[rows, S]``.
SEGMENT_ENDS = "segment_ends"
_PREFIX = "segment_sums/"


class SegmentLoss:
    """A loss function for verl's actor; its value and gradient are those of verl's ``ppo_loss``.

    ``config`` is verl's ``ActorConfig``, ``clip`` the epsilon of the ratio's trust region, ``segments`` the names of a
    response's segments.
    """

    def __init__(self, config: Any, clip: float, segments: tuple[str, ...]) -> None:
        self._config, self._clip, self._segments = config, clip, segments

    def __call__(self, model_output: Any, data: Any, dp_group: Any = None) -> tuple[Any, dict[str, Any]]:
        """Return the loss of one microbatch, and metrics with sums over the tokens of each segment."""
        loss, metrics = ppo_loss(self._config, model_output, data, dp_group)
        with torch.no_grad():
            metrics.update(self._segment_sums(model_output, data))
        return loss, metrics

    def _segment_sums(self, model_output: Any, data: Any) -> dict[str, Any]:
        log_probs = no_padding_2_padding(model_output["log_probs"].detach(), data)
        columns = data.select("response_mask", "old_log_probs", "advantages").to_padded_tensor()
        column = data[SEGMENT_ENDS]  # verl's queue returns rows of equal length
        ends = (column.values() if column.is_nested else column).reshape(-1, len(self._segments))
        statistics = segment_objective(
            log_probs.float(),
            columns["old_log_probs"].float(),
            columns["advantages"].float(),
            segment_masks(ends.to(log_probs.device), self._segments, log_probs.shape[1]),
            clip=self._clip,
        )
        return {
            f"{_PREFIX}{segment}/{name}": Metric(value=total, aggregation=AggregationType.SUM)
            for segment, sums in statistics.segments.items()
            for name, total in {"tokens": float(sums.tokens), **sums.sums()}.items()
        }


def divide_segment_sums(metrics: MutableMapping[str, Any]) -> dict[str, float]:
    """Remove the sums from a step's metrics, and return means over each segment's tokens.

    verl averages the sums over ranks and mini-batches, numerators and denominators alike.
    """
    sums: dict[str, float] = {}
    for name in [name for name in metrics if _PREFIX in name]:  # verl adds a prefix
        key = name.partition(_PREFIX)[2]
        sums[key] = sums.get(key, 0.0) + float(metrics.pop(name))
    found: dict[str, float] = {}
    for key, total in sums.items():
        segment, _, name = key.partition("/")
        if name != "tokens" and (tokens := sums[f"{segment}/tokens"]):
            found[key] = total / tokens
    return found
