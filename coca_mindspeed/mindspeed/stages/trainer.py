"""The hooked trainer of MindSpeed-RL and its metrics."""

import sys
import time
from collections.abc import Iterator
from typing import Any

from coca_mindspeed.mindspeed.stages import columns, metrics
from coca_mindspeed.mindspeed.stages.advantage_stage import compute_advantages
from coca_mindspeed.mindspeed.stages.dock import fetch, report
from coca_mindspeed.mindspeed.stages.metrics import SampleWriter, append_line, cut_logs, finish
from coca_mindspeed.mindspeed.stages.no_reference import NoReference
from coca_mindspeed.mindspeed.stages.validation import Validation
from coca_mindspeed.mindspeed.start.process import process_settings
from coca_mindspeed.mindspeed.start.settings import METRICS
from coca_mindspeed.scoring.metrics import HealthWarnings
from coca_mindspeed.utils.console import print_text


def grpo_trainer(original: Any) -> Any:
    """Subclass MindSpeed-RL's ``RayGRPOTrainer``."""
    import ray

    class SegmentGRPOTrainer(original):
        def __init__(self, actor_worker: Any, ref_worker: Any, reward_list: Any, **kwargs: Any) -> None:
            self._process = process_settings()
            if not self._process.reference:
                ref_worker = NoReference(actor_worker.megatron_config)
            super().__init__(actor_worker, ref_worker, reward_list, **kwargs)
            coca = self._process.coca
            # Made once: Ray sends a new remote function to its workers again.
            self._advantages = ray.remote(compute_advantages).options(num_cpus=self.num_cpus_for_local_task)
            self._samples = SampleWriter(coca, self.tokenizer)
            self._validation = Validation(coca, self) if coca.eval_interval else None
            self._iteration = 0

        def transfer_dock_init(self) -> None:
            """Build the dock with our columns, without having the reward stage wait for them."""
            asked: list[str] = getattr(self, "dataset_additional_keys")  # noqa: B009  set by MindSpeed-RL's base class
            written = (*columns.REWARD_COLUMNS, columns.SEGMENT_LENGTH, columns.ROLLOUT_LOG_PROBS)
            self.dataset_additional_keys = [*asked, *written]
            try:
                super().transfer_dock_init()
            finally:
                self.dataset_additional_keys = asked

        def fit(self, data_iters: Iterator[Any]) -> None:
            """Train; validate between iterations."""
            self._iteration = self.actor_worker.get_iteration()
            if self._process.coca.output_dir is not None:
                cut_logs(self._process.coca.output_dir, self._iteration)
            if self._iteration == self.train_iters:  # killed between its last checkpoint and its last validation
                self._validate(self._iteration)
            super().fit(self._between_iterations(iter(data_iters)))

        def _between_iterations(self, data_iters: Iterator[Any]) -> Iterator[Any]:
            for batch in data_iters:
                if self._iteration % (self._process.coca.eval_interval or 1) == 0:
                    self._validate(self._iteration)
                self._iteration += 1
                metrics.iteration = self._iteration
                yield batch

        def _validate(self, iteration: int) -> None:
            """Validate the weights after an iteration, unless an earlier start has."""
            if self._validation is not None and not self._validation.is_done(iteration):
                self._validation.run(iteration)

        def compute_advantage(self, blocking: bool = False, guarantee_order: bool = False) -> None:
            """Run the advantage stage as a Ray task, as MindSpeed-RL does."""
            start = time.time()
            rows = fetch(
                self._advantages.remote(
                    self.transfer_dock,
                    self._process.coca,
                    count=self.micro_batch_size,
                    group_size=self.n_samples_per_prompt,
                    rows=self.global_batch_size * self.n_samples_per_prompt,
                    guarantee_order=guarantee_order,
                    sample_prompts=self._samples.prompts_wanted(self._iteration),
                )
            )
            self._samples.write(self._iteration, rows, self.transfer_dock)
            end = time.time()
            report(
                self.transfer_dock,
                {"timing/adv": [round(end, 4), round(start, 4)], "end_time/end_adv_time": [round(end, 4)]},
            )

        def save_checkpoint(self, iteration: int) -> None:
            """Save, and validate the last weights, after which ``fit`` draws no prompts."""
            super().save_checkpoint(iteration)
            if iteration == self.train_iters:
                self._validate(iteration)

    return SegmentGRPOTrainer


def divide_ratios(original: Any) -> Any:
    """Wrap ``metrics_post_processing``, which averages the metrics of an iteration: divide the ratios."""

    def metrics_post_processing(values: Any) -> Any:
        return finish(original(values))

    return metrics_post_processing


def iteration_metrics(original: Any) -> Any:
    """Subclass ``Metric``, in which ``fit`` collects what it logs: write whole iterations to a file, warn of problems.

    Metrics that one iteration lacks are not logged with the value of the iteration before.
    """
    last_metric = "vllm_tps"  # that ``fit`` adds to an iteration before it logs

    class IterationMetrics(original):
        _is_whole = False

        def __init__(self) -> None:
            super().__init__()
            self._health = HealthWarnings()

        def update(self, key: Any = "", value: Any = None, cumulate: bool = False) -> None:
            if self._is_whole:
                self.metric.clear()
                self._is_whole = False
            super().update(key, value, cumulate)
            if key == last_metric:
                self._is_whole = True
                process = process_settings()
                if not process.reference:
                    self.metric.pop("timing/non_overlap_reference_model", None)
                if warning := self._health.after_step(metrics.iteration, self.metric):
                    print_text(warning, sys.stderr)
                coca = process.coca
                if coca.output_dir is not None and coca.metrics_file:
                    append_line(coca.output_dir / METRICS, {"step": metrics.iteration, **self.metric})

    return IterationMetrics
