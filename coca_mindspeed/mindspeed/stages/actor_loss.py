"""The actor's loss in MindSpeed-RL's training engine.

Megatron divides the loss of every microbatch by the number of microbatches and averages gradients over data-parallel
ranks.  The objective is normalised over the whole mini-batch on all ranks, so the loss is multiplied by both numbers;
the gradient then does not depend on how a mini-batch is cut, packed or distributed.  Context parallelism needs no
factor: Megatron multiplies the loss by the number of context-parallel ranks itself.
"""

from typing import Any, NamedTuple

import torch
from mindspeed_rl.models.loss.base_loss_func import BaseLossFunc
from mindspeed_rl.utils.compute import compute_kl_penalty, get_parallel_state
from mindspeed_rl.utils.utils import MsProbe
from torch import Tensor

from coca_mindspeed.algorithm.advantages import any_segment, segment_masks
from coca_mindspeed.algorithm.objective import segment_objective, truncated_weights
from coca_mindspeed.algorithm.parsing import SEGMENTS
from coca_mindspeed.errors import ConfigError, TrainingError
from coca_mindspeed.mindspeed.stages.dock import ROLLOUT_LOG_PROBS, SEGMENT_ENDS
from coca_mindspeed.mindspeed.stages.metrics import ratio
from coca_mindspeed.mindspeed.start.process import process_settings
from coca_mindspeed.utils.process import GIB


class MiniBatch(NamedTuple):
    """The mini-batch of the next microbatches: responses on this data-parallel rank (every rank has as many), response
    tokens on all of them, and their number.
    """

    rows: int
    tokens: int
    ranks: int


class SegmentActorLoss(BaseLossFunc):
    """Registered for the GRPO stage in place of MindSpeed-RL's loss; one instance per actor."""

    def __init__(self) -> None:
        super().__init__()
        process = process_settings()
        self._settings, self._reference = process.coca, process.reference
        self._meta: dict[str, Any] = {}
        self.mini_batch: MiniBatch | None = None

    def add_loss_meta_info(self, meta_info: dict[str, Any] | None) -> None:
        """Set MindSpeed-RL's hyperparameters: ``clip_ratio``, ``entropy_coeff``, ``kl_ctrl``, ``kl_penalty``."""
        self._meta = dict(meta_info or {})
        if float(self._meta.get("entropy_coeff", 0.0)):
            raise ConfigError("rl_config.entropy_coeff: the objective has no entropy term; set it to 0")

    def begin_mini_batch(self, batch: dict[str, Tensor]) -> None:
        """Count rows and tokens of the mini-batch; collective over data-parallel ranks."""
        parallel = get_parallel_state()
        lengths = batch["response_length"]
        tokens = lengths.sum().to(torch.int64)
        torch.distributed.all_reduce(tokens, group=parallel.get_data_parallel_group())
        self.mini_batch = MiniBatch(len(lengths), int(tokens), parallel.get_data_parallel_world_size())

    def compute_loss(
        self,
        output: Tensor,
        batch: dict[str, Tensor],
        forward_only: bool = False,
        non_loss_data: bool = True,
        **kwargs: Any,
    ) -> Any:
        """Return loss and statistics of one microbatch, or its log-probabilities if ``forward_only``.

        ``output`` are the model's vocabulary-parallel logits, ``batch`` padded columns of the dock ``[rows, ...]``;
        ``actual_micro_batch_size`` in ``kwargs`` is the mean number of rows of a microbatch.
        """
        log_probs, _ = self.compute_log_probs(output=output, batch=batch, skip_entropy=True, **kwargs)
        if forward_only:
            return log_probs
        mini_batch = self.mini_batch
        if mini_batch is None:
            raise TrainingError("a microbatch came before its mini-batch was counted; is the training engine hooked?")
        microbatches = round(mini_batch.rows / kwargs["actual_micro_batch_size"])
        return self._loss(log_probs.float(), batch, mini_batch, microbatches)

    def _loss(
        self, log_probs: Tensor, batch: dict[str, Tensor], mini_batch: MiniBatch, microbatches: int
    ) -> tuple[Tensor, dict[str, float]]:
        width = log_probs.shape[1]
        segments = SEGMENTS[self._settings.method.training_method.confidence_position]
        masks = segment_masks(batch[SEGMENT_ENDS][:, : len(segments)].long(), segments, width)
        old_log_probs = batch["old_log_prob"][:, :width] if "old_log_prob" in batch else log_probs.detach()
        advantages, threshold = batch["advantages"][:, :width].float(), self._settings.rollout_is_threshold
        if threshold is not None:
            weights = truncated_weights(old_log_probs.float(), batch[ROLLOUT_LOG_PROBS][:, :width], threshold)
            advantages = advantages * weights
        objective = segment_objective(
            log_probs,
            old_log_probs.float(),
            advantages,
            masks,
            clip=float(self._meta.get("clip_ratio", 0.2)),
            aggregation=self._settings.method.loss_aggregation,
            responses=mini_batch.rows * mini_batch.ranks,
            tokens=mini_batch.tokens,
        )
        scale = microbatches * mini_batch.ranks
        loss = objective.loss * scale
        inside = any_segment(masks)
        statistics = {"actor/pg_loss": loss.item()}
        for segment, sums in objective.segments.items():
            for name, total in sums.sums().items():
                statistics |= ratio(f"{segment}/{name}", total, float(sums.tokens))
        # Minus the mean log-prob of the sampled tokens is the policy's entropy in expectation, in nats a token; it
        # costs no pass over the vocabulary.
        for name, mask in {"rollout": inside, **masks}.items():
            statistics |= ratio(f"{name}/entropy", -_sum(old_log_probs, mask), mask.sum().item())
        if threshold is not None:
            statistics |= ratio("rollout/is_weight", _sum(weights, inside), inside.sum().item())
        if self._reference:
            penalty = compute_kl_penalty(log_probs, batch["ref_log_prob"][:, :width], self._meta["kl_penalty"])
            kl = torch.where(inside, penalty, 0.0).sum() / mini_batch.tokens * scale
            loss = loss + self._meta["kl_ctrl"].value * kl
            statistics["actor/kl_loss"] = kl.item()
        if ROLLOUT_LOG_PROBS in batch:
            gap = (old_log_probs - batch[ROLLOUT_LOG_PROBS][:, :width]).abs()
            statistics |= ratio("rollout/log_prob_gap", _sum(gap, inside), inside.sum().item())
        # For msprobe_config.key_data_dump, under MindSpeed-RL's own names where it has them.
        MsProbe.save_data(
            {
                "old_log_prob": old_log_probs,
                "log_prob": log_probs,
                "advantages": batch["advantages"],
                **{f"{name}_mask": mask for name, mask in masks.items()},
                "loss": objective.loss,
            }
        )
        return loss, statistics


def _sum(values: Tensor, mask: Tensor) -> float:
    return torch.where(mask, values, 0.0).sum().item()


def count_mini_batches(original: Any) -> Any:
    """Wrap ``BaseTrainingEngine._forward_backward_batch``: tell our loss its mini-batch, and report the peak memory.

    The statistics of microbatches, which only the last pipeline stage has, are averaged over mini-batches and ranks.
    """

    def forward_backward_batch(self: Any, batch: dict[str, Tensor], forward_only: bool = False) -> Any:
        if forward_only or not isinstance(self.loss_func, SegmentActorLoss):
            return original(self, batch, forward_only)
        device: Any = getattr(torch, "npu")  # noqa: B009  added by torch_npu
        device.reset_peak_memory_stats()  # of the rollout, which is in the same process
        self.loss_func.begin_mini_batch(batch)
        statistics = original(self, batch, forward_only)
        for last in statistics[-1:]:
            last["actor/max_memory_allocated_gib"] = device.max_memory_allocated() / GIB
        return statistics

    return forward_backward_batch
