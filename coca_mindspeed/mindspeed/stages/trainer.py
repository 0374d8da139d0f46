"""MindSpeed-RL's trainer with segment advantages: its advantage task, validation and metrics.

The loop is MindSpeed-RL's own ``fit``: rollout, rewards, old log-probabilities, advantages and update, each through the
transfer dock.  How a run differs from the paper (arXiv 2603.05881), apart from the options of docs/method.md:

1. Invalid responses have a format advantage of their own (``method.separate_format``; false: the paper's form).
2. Ungradable answers take no part in GESR and advantages; a group with fewer than two gradable answers trains nothing.
3. In training, an answer that only restates the question earns nothing (``data.require_evaluated``; false: the paper's
   form).
4. The ratio is taken to log-probabilities that the training engine computes before the update, not to vLLM's.  Token
   weights that correct for vLLM may be added (``coca.rollout_is_threshold``; null: the paper's form).
5. A KL term against a reference model can be added (``rl_config.init_kl_coef``; 0: the paper's form).
6. The loss of a mini-batch is normalised over all ranks (:mod:`~coca_mindspeed.mindspeed.stages.actor_loss`), so that
   the gradient does not depend on microbatches, packing or ranks; weights and activations are bfloat16.
7. A prompt longer than ``rollout.max_prompt_tokens`` is an error; a response cut off at ``max_new_tokens`` is graded.
"""

import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from coca_mindspeed.mindspeed.stages import metrics
from coca_mindspeed.mindspeed.stages.advantage_task import compute_advantages
from coca_mindspeed.mindspeed.stages.dataset import question_order
from coca_mindspeed.mindspeed.stages.dock import (
    ROLLOUT_LOG_PROBS,
    SCORES,
    fetch,
    report,
)
from coca_mindspeed.mindspeed.stages.metrics import IterationRow, SampleWriter, append_line, cut_logs
from coca_mindspeed.mindspeed.stages.reference import NoReference
from coca_mindspeed.mindspeed.stages.validation import Validation
from coca_mindspeed.mindspeed.start.process import METRICS, process_settings
from coca_mindspeed.mindspeed.start.records import all_records, run_records
from coca_mindspeed.scoring.health import HealthWarnings
from coca_mindspeed.scoring.metrics import HELD_OUT
from coca_mindspeed.utils.console import print_text
from coca_mindspeed.utils.saving import CheckpointTimer, StopRequest

_Upstream: Any = object  # the class of MindSpeed-RL is the next base
_BETWEEN = "seconds/between_iterations"  # of a validation, and of a checkpoint by the clock


class _StoppedError(Exception):
    """The run stops between two iterations, as it was asked to."""


class SegmentTrainer(_Upstream):
    """The part of MindSpeed-RL's trainer that is ours; its methods override those of ``RayGRPOTrainer``."""

    def __init__(self, actor_worker: Any, ref_worker: Any, reward_list: Any, **kwargs: Any) -> None:
        import ray

        self._process = process_settings()
        if not self._process.reference:
            ref_worker = NoReference(actor_worker.megatron_config)
        super().__init__(actor_worker, ref_worker, reward_list, **kwargs)
        coca, config = self._process.coca, self.actor_worker.megatron_config
        self._questions = question_order(run_records(config.data_path), config)
        shared = ray.put(all_records())
        fetch([reward.take_records.remote(shared) for reward in reward_list if hasattr(reward, "take_records")])
        # Made once: Ray sends a new remote function to its workers again.
        self._advantages = ray.remote(compute_advantages).options(num_cpus=self.num_cpus_for_local_task)
        self._samples = SampleWriter(coca, self.tokenizer)
        self._validation = Validation(coca, self) if coca.validation_interval else None
        self._iteration = 0
        output = coca.output_dir
        self._stop = StopRequest(None) if output is None else StopRequest.of(output.parent)

    def transfer_dock_init(self) -> None:
        """Build the dock with our columns, without having the reward stage wait for them."""
        asked: list[str] = getattr(self, "dataset_additional_keys")  # noqa: B009  set by MindSpeed-RL's base class
        written = (*SCORES.values(), ROLLOUT_LOG_PROBS)
        self.dataset_additional_keys = [*asked, *written]
        try:
            super().transfer_dock_init()
        finally:
            self.dataset_additional_keys = asked

    def fit(self, data_iters: Iterator[Any]) -> None:
        """Train; validate and save between iterations, and stop there if the run is asked to."""
        self._iteration = self.actor_worker.get_iteration()
        self._timer = CheckpointTimer(self._process.coca.checkpoint_minutes, self._iteration)
        if self._process.coca.output_dir is not None:
            cut_logs(self._process.coca.output_dir, self._iteration)
        if self._iteration == self.train_iters:  # killed between its last checkpoint and its last validation
            self._validate(self._iteration)
        with suppress(_StoppedError):
            super().fit(self._between_iterations(iter(data_iters)))

    def _between_iterations(self, data_iters: Iterator[Any]) -> Iterator[Any]:
        for batch in data_iters:
            start = time.monotonic()
            self._save_or_stop()
            if self._iteration % (self._process.coca.validation_interval or 1) == 0:
                self._validate(self._iteration)
                self._save_or_stop()  # if it was asked to meanwhile
            self._iteration += 1
            # Of this iteration, whose timing/all includes it; a validation clears what was reported before.
            report(self.transfer_dock, {_BETWEEN: [time.monotonic() - start]})
            yield batch

    def _save_or_stop(self) -> None:
        """Save the last iteration if that is due by the clock; if the run is asked to stop, save it and raise."""
        asked = self._stop.is_asked()
        if self._timer.is_due(self._iteration) or (asked and self._iteration > self._timer.step):
            self.save_checkpoint(self._iteration)
        if asked:
            self._stop.answer(self._iteration)
            raise _StoppedError

    def _validate(self, iteration: int) -> None:
        """Validate the weights after an iteration, unless an earlier start has."""
        if self._validation is not None and not self._validation.is_done(iteration):
            self._validation.run(iteration)

    def compute_advantage(self, blocking: bool = False, guarantee_order: bool = False) -> None:
        """Run the advantage task as a Ray task, as MindSpeed-RL does."""
        start, step = time.time(), self._iteration - 1
        rows = fetch(
            self._advantages.remote(
                self.transfer_dock,
                self._process.coca,
                count=self.micro_batch_size,
                group_size=self.n_samples_per_prompt,
                rows=self.global_batch_size * self.n_samples_per_prompt,
                guarantee_order=guarantee_order,
                sample_prompts=self._samples.prompts_wanted(self._iteration),
                seen=(self._questions.seen(step), self._questions.times_asked(step)),
            )
        )
        self._samples.write(self._iteration, rows, self.transfer_dock)
        end = time.time()
        report(
            self.transfer_dock,
            {
                "timing/adv": [round(end, 4), round(start, 4)],
                "end_time/end_adv_time": [round(end, 4)],
            },
        )

    def save_checkpoint(self, iteration: int) -> None:
        """Save, and validate the last weights, after which ``fit`` draws no prompts."""
        super().save_checkpoint(iteration)
        self._timer.saved(iteration)
        if iteration == self.train_iters:
            self._validate(iteration)


def grpo_trainer(original: Any) -> Any:
    """Subclass MindSpeed-RL's ``RayGRPOTrainer``."""
    return type("SegmentGRPOTrainer", (SegmentTrainer, original), {})


def divide_ratios(original: Any) -> Any:
    """Wrap ``metrics_post_processing``, which averages the metrics of an iteration: divide the ratios."""

    def metrics_post_processing(values: Any) -> Any:
        return metrics.divide_ratios(original(values))

    return metrics_post_processing


class IterationCollector(_Upstream):
    """Collects a row for each iteration.

    So the metrics that one iteration lacks are not logged with the value of the iteration before.
    """

    def __init__(self) -> None:
        super().__init__()
        self.reset()

    def reset(self) -> None:
        self.metric = IterationRow()

    def update(self, key: Any = "", value: Any = None, cumulate: bool = False) -> None:
        if self.metric.is_logged:
            self.reset()
        super().update(key, value, cumulate)


def iteration_metrics(original: Any) -> Any:
    """Subclass ``Metric``, the collector of ``fit``."""
    return type("IterationMetrics", (IterationCollector, original), {})


class IterationLog(_Upstream):
    """Writes an iteration with all its metrics, of which ``fit`` tells it by ``info``, to a file; warns of problems.

    The metrics ``held_out/`` of a validation before the iteration, which ``validation.jsonl`` has, are not logged, and
    ``e2e_tps`` is of the iteration without it.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._health = HealthWarnings()

    def info(self, msg: Any, iteration: int | None = None, steps: int | None = None) -> None:
        if iteration is not None and isinstance(msg, IterationRow):
            self._finish(msg, iteration)
        super().info(msg, iteration, steps)

    def _finish(self, row: IterationRow, iteration: int) -> None:
        process = process_settings()
        if not process.reference:
            row.pop("timing/non_overlap_reference_model", None)
        if _BETWEEN in row:
            row["e2e_tps"] *= row["timing/all"] / (row["timing/all"] - row[_BETWEEN])
        coca = process.coca
        if warning := self._health.after_step(iteration, row, coca.method.training_method):
            print_text(warning, sys.stderr)
        for name in [name for name in row if name.startswith(f"{HELD_OUT}/")]:
            del row[name]
        if coca.output_dir is not None and coca.metrics_file:
            append_line(coca.output_dir / METRICS, {"step": iteration, **row})
        row.is_logged = True


def iteration_logger(original: Any) -> Any:
    """Subclass ``Loggers``, which ``fit`` logs by."""
    return type("IterationLogger", (IterationLog, original), {})
