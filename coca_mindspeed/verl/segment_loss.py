"""verl's own loss, and what it did to each segment: clip shares and KL, which verl knows for whole responses alone."""

from collections.abc import Mapping, MutableMapping
from typing import Any

import torch
from verl.utils.metric import AggregationType, Metric
from verl.workers.utils.losses import ppo_loss
from verl.workers.utils.padding import no_padding_2_padding

from coca_mindspeed.algorithm.advantages import segment_masks
from coca_mindspeed.algorithm.objective import segment_objective

#: The column of verl's queue with the tokens of each row's confidence segment, int ``[rows, 1]``.
CONFIDENCE_TOKENS = "confidence_tokens"
_PREFIX = "segment_sums/"
_COUNTED = ("clipped", "kl")
_NAMES = {"clipped": "clip_fraction", "kl": "kl"}


class SegmentLoss:
    """A loss function for verl's actor.  Its value and gradient are those of verl's ``ppo_loss``."""

    def __init__(self, config: Any, clip: float) -> None:
        """Remember what to compute with.

        Args:
            config: verl's ``ActorConfig``.
            clip: epsilon of the ratio's trust region.
        """
        self._config, self._clip = config, clip

    def __call__(self, model_output: Any, data: Any, dp_group: Any = None) -> tuple[Any, dict[str, Any]]:
        """Loss of one microbatch, and sums over the tokens of each of its segments among the metrics."""
        loss, metrics = ppo_loss(self._config, model_output, data, dp_group)
        with torch.no_grad():
            metrics.update(self._segment_sums(model_output, data))
        return loss, metrics

    def _segment_sums(self, model_output: Any, data: Any) -> dict[str, Any]:
        log_probs = no_padding_2_padding(model_output["log_probs"].detach(), data)
        columns = data.select("response_mask", "old_log_probs", "advantages").to_padded_tensor()
        lengths = columns["response_mask"].sum(dim=1).long()
        column = data[CONFIDENCE_TOKENS]  # one number a row, which verl's queue gives back as rows of length 1
        confidence = (column.values() if column.is_nested else column.reshape(-1)).to(lengths)
        statistics = segment_objective(
            log_probs.float(),
            columns["old_log_probs"].float(),
            columns["advantages"].float(),
            segment_masks(confidence, lengths, log_probs.shape[1]),
            clip=self._clip,
        )
        return {
            f"{_PREFIX}{segment}/{name}": Metric(value=float(getattr(sums, name)), aggregation=AggregationType.SUM)
            for segment, sums in (("confidence", statistics.confidence), ("answer", statistics.answer))
            for name in ("tokens", *_COUNTED)
        }


def divide_segment_sums(metrics: MutableMapping[str, Any]) -> dict[str, float]:
    """Take the sums out of a step's metrics and give means over each segment's tokens, by the names of every engine.

    verl averages sums over ranks and mini-batches, numerators and denominators alike, so they divide to the same.
    """
    sums = {name: float(metrics.pop(name)) for name in list(metrics) if _PREFIX in name}
    found: dict[str, float] = {}
    for segment in ("confidence", "answer"):
        tokens = _sum_of(sums, segment, "tokens")
        for name in _COUNTED:
            if tokens:
                found[f"{segment}/{_NAMES[name]}"] = _sum_of(sums, segment, name) / tokens
    return found


def _sum_of(sums: Mapping[str, float], segment: str, name: str) -> float:
    return sum(value for key, value in sums.items() if key.endswith(f"{_PREFIX}{segment}/{name}"))
