"""MindSpeed-RL's trainer with segment advantages: its advantage stage, validation and metrics.

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
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from coca_mindspeed.algorithm.credit import CreditRule
from coca_mindspeed.errors import TrainingError
from coca_mindspeed.evaluation.predictions import VALIDATIONS, Prediction, validation_file, write_predictions
from coca_mindspeed.mindspeed.stages import metrics
from coca_mindspeed.mindspeed.stages.dataset import RECORD, question_order
from coca_mindspeed.mindspeed.stages.dock import (
    ROLLOUT_LOG_PROBS,
    SCORES,
    batches,
    check_groups,
    fetch,
    merged,
    put,
    read_rows,
    report,
)
from coca_mindspeed.mindspeed.stages.metrics import IterationRow, SampleWriter, append_line, as_ratios, cut_logs
from coca_mindspeed.mindspeed.start.process import METRICS, VALIDATION, CocaSettings, process_settings
from coca_mindspeed.mindspeed.start.records import load_prompts, read_run_records
from coca_mindspeed.scoring.health import HealthWarnings
from coca_mindspeed.scoring.metrics import HELD_OUT, TIMES_ASKED, WeightedMean, rollout_metrics, sight_metrics, values
from coca_mindspeed.scoring.responses import held_out_gap, held_out_metrics
from coca_mindspeed.scoring.rollout import Scored, confidence_log_probs
from coca_mindspeed.utils.console import print_text
from coca_mindspeed.utils.json_files import read_steps


def grpo_trainer(original: Any) -> Any:
    """Subclass MindSpeed-RL's ``RayGRPOTrainer``."""
    import ray

    class SegmentGRPOTrainer(original):
        def __init__(self, actor_worker: Any, ref_worker: Any, reward_list: Any, **kwargs: Any) -> None:
            self._process = process_settings()
            if not self._process.reference:
                ref_worker = NoReference(actor_worker.megatron_config)
            super().__init__(actor_worker, ref_worker, reward_list, **kwargs)
            coca, config = self._process.coca, self.actor_worker.megatron_config
            self._questions = question_order(read_run_records(Path(config.data_path), coca.data_sha256), config)
            # Made once: Ray sends a new remote function to its workers again.
            self._advantages = ray.remote(compute_advantages).options(num_cpus=self.num_cpus_for_local_task)
            self._samples = SampleWriter(coca, self.tokenizer)
            self._validation = Validation(coca, self) if coca.validation_interval else None
            self._iteration = 0

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
            """Train; validate between iterations."""
            self._iteration = self.actor_worker.get_iteration()
            if self._process.coca.output_dir is not None:
                cut_logs(self._process.coca.output_dir, self._iteration)
            if self._iteration == self.train_iters:  # killed between its last checkpoint and its last validation
                self._validate(self._iteration)
            super().fit(self._between_iterations(iter(data_iters)))

        def _between_iterations(self, data_iters: Iterator[Any]) -> Iterator[Any]:
            for batch in data_iters:
                if self._iteration % (self._process.coca.validation_interval or 1) == 0:
                    self._validate(self._iteration)
                self._iteration += 1
                yield batch

        def _validate(self, iteration: int) -> None:
            """Validate the weights after an iteration, unless an earlier start has."""
            if self._validation is not None and not self._validation.is_done(iteration):
                self._validation.run(iteration)

        def compute_advantage(self, blocking: bool = False, guarantee_order: bool = False) -> None:
            """Run the advantage stage as a Ray task, as MindSpeed-RL does."""
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
            if iteration == self.train_iters:
                self._validate(iteration)

    return SegmentGRPOTrainer


def divide_ratios(original: Any) -> Any:
    """Wrap ``metrics_post_processing``, which averages the metrics of an iteration: divide the ratios."""

    def metrics_post_processing(values: Any) -> Any:
        return metrics.divide_ratios(original(values))

    return metrics_post_processing


def iteration_metrics(original: Any) -> Any:
    """Subclass ``Metric``, the collector of ``fit``: each iteration has a row of its own.

    So the metrics that one iteration lacks are not logged with the value of the iteration before.
    """

    class IterationMetrics(original):
        def __init__(self) -> None:
            super().__init__()
            self.reset()

        def reset(self) -> None:
            self.metric = IterationRow()

        def update(self, key: Any = "", value: Any = None, cumulate: bool = False) -> None:
            if self.metric.is_logged:
                self.reset()
            super().update(key, value, cumulate)

    return IterationMetrics


def iteration_logger(original: Any) -> Any:
    """Subclass ``Loggers``, whose ``info`` is how ``fit`` says that an iteration has all its metrics.

    They are written to a file, and problems are warned of.  The metrics ``held_out/`` of a validation before the
    iteration, which ``validation.jsonl`` has, are not logged.
    """

    class IterationLogger(original):
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
            coca = process.coca
            if warning := self._health.after_step(iteration, row, coca.method.training_method):
                print_text(warning, sys.stderr)
            for name in [name for name in row if name.startswith(f"{HELD_OUT}/")]:
                del row[name]
            if coca.output_dir is not None and coca.metrics_file:
                append_line(coca.output_dir / METRICS, {"step": iteration, **row})
            row.is_logged = True

    return IterationLogger


class Validation:
    """Runs validations for one trainer."""

    def __init__(self, settings: CocaSettings, trainer: Any) -> None:
        assert settings.eval_data is not None
        assert settings.output_dir is not None
        self._settings, self._trainer = settings, trainer
        self._file, self._log = settings.eval_data, settings.output_dir / VALIDATION
        rl_config = trainer.actor_worker.rl_config
        _, self._prompts = load_prompts(self._file, trainer.tokenizer.tokenizer, settings, rl_config.max_prompt_length)
        self._graders = [reward for reward in trainer.reward_list if hasattr(reward, "score_rows")]

    def is_done(self, iteration: int) -> bool:
        """Whether the log has the validation after an iteration."""
        return self._log.exists() and any(row["step"] == iteration for row in read_steps(self._log))

    def run(self, iteration: int) -> dict[str, float]:
        """Evaluate the current weights; write predictions, log Acc, AUROC, ECE, Brier, SR and TTC under ``eval/``."""
        trainer, start = self._trainer, time.perf_counter()
        questions, size = list(range(len(self._prompts))), trainer.global_batch_size
        chunks = (questions[first : first + size] for first in range(0, len(questions), size))
        answers = [answer for chunk in chunks for answer in self._roll_out(chunk)]
        gap = values(held_out_gap(answers))
        named = {f"eval/{name}": value for name, value in held_out_metrics(answers).items()} | gap
        # Before the log, by which a validation is done.
        write_predictions(validation_file(self._log.parent / VALIDATIONS, iteration), answers)
        append_line(self._log, {"step": iteration, **named})
        if trainer.tensorboard is not None:
            for name, value in named.items():
                trainer.tensorboard.add_scalar(name, value, iteration)
        for logger in (trainer.wandb, getattr(trainer, "swanlab", None)):
            if logger is not None:
                logger.log_metrics(named, iteration)
        # Of the following iteration, whose timing/all includes it; the gap is for the health warnings.
        report(
            trainer.transfer_dock,
            {"seconds/evaluation": [time.perf_counter() - start], **{name: [value] for name, value in gap.items()}},
        )
        print(f"validation at iteration {iteration}: {named}", flush=True)
        return named

    def _roll_out(self, questions: list[int]) -> list[Prediction]:
        from mindspeed_rl.trainer.utils.transfer_dock import put_prompts_experience

        trainer = self._trainer
        dock, samples = trainer.transfer_dock, trainer.n_samples_per_prompt
        # The dock takes whole iterations: fill up with the last question, and drop the repetitions afterwards.
        full = questions + [questions[-1]] * (trainer.global_batch_size - len(questions))
        batch = {
            "prompts": [torch.from_numpy(self._prompts[index]).long() for index in full],
            RECORD: [torch.tensor([index]) for index in full],
        }
        rows, indexes = put_prompts_experience(batch, samples, [RECORD])
        fetch(dock.put_experience.remote(data_dict=rows, indexes=indexes, is_prompt=True))
        trainer.actor_worker.generate_sequences(blocking=True)
        trainer.actor_worker.wait_all_ref_objs_run_over()
        # Wait for every column of every row: a column written after the dock is cleared would enter the next iteration.
        scored_by = ["responses", "response_length", RECORD]
        others = ["input_ids", *([ROLLOUT_LOG_PROBS] if self._settings.rollout_log_probs else [])]
        everything = read_rows(
            dock, [*scored_by, *others], list(range(len(full) * samples)), stall_timeout=self._settings.stall_timeout
        )
        wanted = list(range(len(questions) * samples))
        responses = {name: everything[name][: len(wanted)] for name in scored_by}
        scored: list[Prediction] = fetch(self._graders[0].score_rows.remote(responses, wanted, str(self._file)))
        fetch(dock.clear.remote())
        return scored


def compute_advantages(
    dock: Any,
    settings: CocaSettings,
    *,
    count: int,
    group_size: int,
    rows: int,
    guarantee_order: bool,
    sample_prompts: int,
    seen: tuple[Sequence[bool], float] | None = None,
) -> list[dict[str, Any]]:
    """Take all scored rows of the iteration out of the dock and write ``advantages`` and ``returns``.

    ``count`` rows are taken and written at a time, of ``rows`` in the iteration, in order with ``guarantee_order``.
    ``seen``: whether an earlier iteration asked each question, and how often a question was asked on average so far.

    Returns:
        ``index`` and :meth:`.Credited.rows` of the responses to the first ``sample_prompts`` prompts.
    """
    if count % group_size:
        raise TrainingError(
            f"rl_config.adv_dispatch_size {count} does not hold whole groups of n_samples_per_prompt {group_size}"
        )
    assigned = [list(range(i, min(i + count, rows))) for i in range(0, rows, count)] if guarantee_order else None
    columns = [*SCORES.values(), *([ROLLOUT_LOG_PROBS] if settings.method.reads_log_probs else [])]
    portions = batches(
        dock, "compute_advantage", columns, count, assigned=assigned, stall_timeout=settings.stall_timeout
    )
    batch = merged(list(portions))  # method.advantage_scale=batch needs the whole step
    start = time.perf_counter()
    check_groups(batch.indexes, group_size)
    if len(batch.indexes) != rows:
        raise TrainingError(f"the advantage stage got {len(batch.indexes)} rows of an iteration of {rows}")
    scored, rule = Scored.from_columns(batch.scores()), CreditRule(settings.method, settings.stage)
    # MindSpeed-RL's loop computes the old log-probs later; those of the rollout are of the same weights.
    sampled = batch.padded(ROLLOUT_LOG_PROBS) if ROLLOUT_LOG_PROBS in columns else None
    log_probs = confidence_log_probs(rule, sampled, scored.segment_ends)
    credited = scored.give_credit(rule, group_size, log_probs=log_probs)
    tokens = [row[:length] for row, length in zip(credited.token_advantages, scored.lengths.tolist(), strict=True)]
    for first in range(0, rows, count):
        part = slice(first, first + count)
        put(dock, {"advantages": tokens[part], "returns": tokens[part]}, batch.indexes[part])
    means = rollout_metrics(credited)
    if seen is not None:
        before, times = seen
        means |= sight_metrics(scored, [before[index // group_size] for index in batch.indexes[::group_size]])
        means[TIMES_ASKED] = WeightedMean(times, 1)
    measured = {**as_ratios(means), "seconds/advantage": time.perf_counter() - start}
    report(dock, {name: [value] for name, value in measured.items()})
    shown = [row for row, index in enumerate(batch.indexes) if index < sample_prompts * group_size]
    return [{"index": batch.indexes[i], **row} for i, row in zip(shown, credited.rows(shown), strict=True)]


class NoReference:
    """The methods that MindSpeed-RL's trainer calls on its reference worker group; they do nothing."""

    def __init__(self, megatron_config: Any) -> None:
        self.megatron_config = megatron_config

    def sync_init_transfer_dock(self, *_docks: Any) -> None: ...

    def compute_ref_log_prob(self, blocking: bool = False) -> None: ...

    def wait_all_ref_objs_run_over(self) -> None: ...

    def initialize(self) -> "NoReference":
        return self


def without_reference_workers(original: Any) -> Any:
    """Replace ``RayActorGroup`` as ``train`` uses it: without a group of reference workers.

    A subclass, because the trainer tells worker groups from other reward workers by this class.  It also completes
    separate-worker mode, whose actors read profiler and msprobe settings that ``train`` does not pass.
    """

    class WorkerGroup(original):
        def __new__(cls, worker: Any = None, *_args: Any, megatron_config: Any = None, **_kwargs: Any) -> Any:
            name = getattr(getattr(worker, "__ray_actor_class__", None), "__name__", "")
            if name == "ReferenceWorker" and not process_settings().reference:
                return NoReference(megatron_config)
            return super().__new__(cls)

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            from mindspeed_rl.config_cls.mindstudio_config import MsprobeConfig, ProfilerConfig

            role = "integrated"  # as in train itself
            off = {"profiler_config": ProfilerConfig({}, role=role), "msprobe_config": MsprobeConfig({}, role=role)}
            super().__init__(*args, **{**off, **kwargs})

        def get_consumed_train_samples(self) -> int:
            """Prompts of the finished iterations, where a resumed run continues.

            MindSpeed-RL's workers count a whole iteration for every dispatch of an update.
            """
            return int(self.get_iteration() * self.megatron_config.global_batch_size)

    return WorkerGroup
