"""The loss of verl's actor: ``algorithm.objective``, with clip fractions and KL of each segment among its metrics."""

from collections.abc import MutableMapping
from typing import Any

from verl.utils.metric import AggregationType, Metric
from verl.workers.utils.padding import no_padding_2_padding

from coca_mindspeed.algorithm.advantages import segment_masks
from coca_mindspeed.algorithm.methods import MethodSettings
from coca_mindspeed.algorithm.objective import segment_objective
from coca_mindspeed.algorithm.parsing import SEGMENTS

#: The column of verl's queue with the tokens of each row up to the end of each segment, int ``[rows, S]``.
SEGMENT_ENDS = "segment_ends"
#: The column of the weights by which verl corrects for the rollout engine; absent without a correction.
ROLLOUT_WEIGHTS = "rollout_is_weights"
_PREFIX = "segment_sums/"


class SegmentLoss:
    """A loss function for verl's actor, in place of verl's ``ppo_loss``, whose keys it does not read.

    verl adds up the gradients of microbatches and averages them over data-parallel ranks, so the loss is normalised by
    the responses and tokens of the mini-batch on all ranks, and multiplied by the number of ranks.
    """

    def __init__(self, method: MethodSettings) -> None:
        self._clip, self._aggregation = method.clip, method.loss_aggregation
        self._segments = SEGMENTS[method.training_method.confidence_position]

    def __call__(self, model_output: Any, data: Any, dp_group: Any = None) -> tuple[Any, dict[str, Any]]:
        """Return the loss of one microbatch, and metrics with sums over the tokens of each segment."""
        log_probs = no_padding_2_padding(model_output["log_probs"], data)
        weighted = ROLLOUT_WEIGHTS in data
        names = ("response_mask", "old_log_probs", "advantages", *([ROLLOUT_WEIGHTS] if weighted else []))
        columns = data.select(*names).to_padded_tensor()
        column = data[SEGMENT_ENDS]  # verl's queue returns rows of equal length
        ends = (column.values() if column.is_nested else column).reshape(-1, len(self._segments))
        advantages = columns["advantages"].float()
        if weighted:  # as a positive factor, a weight passes through minimum and clip
            advantages = advantages * columns[ROLLOUT_WEIGHTS].float()
        old_log_probs = columns["old_log_probs"].float()
        masks = segment_masks(ends.to(log_probs.device), self._segments, log_probs.shape[1])
        objective = segment_objective(
            log_probs.float(),
            old_log_probs,
            advantages,
            masks,
            clip=self._clip,
            aggregation=self._aggregation,
            responses=data["global_batch_size"],
            tokens=data["batch_num_tokens"],
        )
        loss = objective.loss * data["dp_size"]
        metrics = {
            f"{_PREFIX}{segment}/{name}": total
            for segment, sums in objective.segments.items()
            for name, total in {
                "tokens": float(sums.tokens),
                **sums.sums(),
                # Minus the log-prob of a sampled token: its mean is the policy's entropy in expectation.
                "entropy": -float(old_log_probs.where(masks[segment], 0.0).sum()),
            }.items()
        }
        metrics["actor/pg_loss"] = float(loss.detach())
        return loss, {name: Metric(value=value, aggregation=AggregationType.SUM) for name, value in metrics.items()}


def divide_segment_sums(metrics: MutableMapping[str, Any]) -> dict[str, float]:
    """Remove the sums from a step's metrics, and return means over each segment's tokens.

    verl averages the sums over ranks and mini-batches, numerators and denominators alike.
    """
    sums: dict[str, float] = {}
    for name in [name for name in metrics if _PREFIX in name]:  # verl adds a prefix
        key = name.partition(_PREFIX)[2]
        sums[key] = sums.get(key, 0.0) + float(metrics.pop(name))
    means: dict[str, float] = {}
    for key, total in sums.items():
        segment, _, name = key.partition("/")
        if name != "tokens" and (tokens := sums[f"{segment}/tokens"]):
            means[key] = total / tokens
    return means
