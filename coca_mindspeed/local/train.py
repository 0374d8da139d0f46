"""The training loop: rollout, grading, rewards, advantages, update (the paper's Algorithm 1)."""

import contextlib
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from coca_mindspeed.config.schema import RunConfig
from coca_mindspeed.data.records import Record
from coca_mindspeed.errors import TrainingError
from coca_mindspeed.evaluation.metrics.calibration import calibration_metrics, reading_metrics
from coca_mindspeed.evaluation.predictions import (
    UNGRADABLE_SHARE,
    Prediction,
    confidence_mass,
    outcomes,
    read_predictions,
    write_predictions,
)
from coca_mindspeed.grading.unevaluated import EvaluatedOnly
from coca_mindspeed.grading.verdict import MeasuredGrader
from coca_mindspeed.local.checkpoint import export_model, load_optimizer_state, save_checkpoint
from coca_mindspeed.local.interrupt import InterruptedRunError, interruptible, stop_request
from coca_mindspeed.local.logging import LogError, RunLog
from coca_mindspeed.local.optimizer import build_optimizer
from coca_mindspeed.local.policy import Policy
from coca_mindspeed.local.progress import MEAN_OF, StepProgress, TrainingProgress
from coca_mindspeed.local.respond import predict, respond, sample_rows, step_metrics
from coca_mindspeed.local.run_directory import Checkpoint, list_checkpoints
from coca_mindspeed.local.sampler import NoDistributionError
from coca_mindspeed.local.schedule import generator, learning_rate, records_of_step
from coca_mindspeed.local.update import NotFiniteError, update_policy
from coca_mindspeed.scoring.metrics import HealthWarnings
from coca_mindspeed.scoring.responses import credit_rule, response_scorer
from coca_mindspeed.utils.eta import STEPS
from coca_mindspeed.utils.files import PROGRESS
from coca_mindspeed.utils.packages import is_installed

_MEMORY_ADVICE = (
    "trainer.microbatch_tokens or trainer.microbatch_prompts bounds the memory of an update, "
    "model.gradient_checkpointing=true lowers it, and rollout.batch_responses bounds a rollout; "
    "coca-mindspeed check says how much each needs, and --resume accepts the change"
)


@dataclass
class Trainer:
    """Trains a policy in place.

    With ``data.require_evaluated``, restated questions earn nothing in training.  The held-out questions
    ``evaluate_records`` may be empty.  The metrics of ``baseline``, answers before the first step, are logged as step 0
    together with step 1.
    """

    config: RunConfig
    policy: Policy
    grader: MeasuredGrader
    train_records: Sequence[Record]
    evaluate_records: Sequence[Record]
    output: Path
    run_id: str
    show_progress: bool = True
    baseline: Sequence[Prediction] = ()

    def __post_init__(self) -> None:
        self.method = self.config.method.training_method
        self.evaluated_only = EvaluatedOnly(self.grader)
        self.checkpoints = self.output / "checkpoints"
        self.total_steps = self.config.total_steps
        self._progress = TrainingProgress(self.total_steps, enabled=False)
        self._health = HealthWarnings()

    def run(self, resume_from: Checkpoint | None = None) -> None:
        """Train to the last step, from the start or from a checkpoint whose weights :attr:`policy` holds.

        Raises:
            TrainingError: a loss or gradient is not finite, memory is exhausted, or a file cannot be written.
            InterruptedRunError: Ctrl-C or SIGTERM; the state is saved.
        """
        start = resume_from.step if resume_from else 0
        optimizer = build_optimizer(self.policy, self.config.optimizer)
        if resume_from is not None and start % self.config.trainer.steps:  # a new stage starts with a new optimizer
            optimizer.load_state_dict(load_optimizer_state(resume_from, self.policy.device))
        settings = self.config.model_dump(mode="json")
        log = RunLog(self.output, self.config.logging, settings, self.run_id, resume_step=start)
        interval = self.config.evaluation.interval if self.evaluate_records else 0
        before = log.last_rows(max(MEAN_OF, STEPS, interval))
        self._progress = TrainingProgress(self.total_steps, self.show_progress, start, before, interval=interval)
        with (
            interruptible("stopped in the middle of a step", self._resume_hint),
            stop_request() as stop,
            self._progress,
        ):
            try:
                for step in range(start, self.total_steps):
                    stage, stage_step = divmod(step, self.config.trainer.steps)
                    if stage_step == 0 and step > start:
                        optimizer = build_optimizer(self.policy, self.config.optimizer)
                    try:
                        metrics, timing = self._step(step, stage, stage_step, optimizer, log)
                        if step == 0 and self.baseline:
                            log.write(0, self._evaluation_metrics(self.baseline, 0, log), {})
                        log.write(step + 1, metrics, timing)
                    except (NoDistributionError, NotFiniteError, LogError) as error:
                        raise TrainingError(f"step {step + 1}: {error}\n{self._resume_hint()}") from error
                    except (MemoryError, RuntimeError) as error:
                        if not _out_of_memory(error):
                            raise
                        what = (str(error) or type(error).__name__).splitlines()[0]
                        advice = f"{_MEMORY_ADVICE}\n{self._resume_hint()}"
                        raise TrainingError(f"step {step + 1}: out of memory ({what})\n{advice}") from error
                    self._progress.advance(step + 1, metrics, timing)
                    if warning := self._health.after_step(step + 1, metrics):
                        self._progress.note(warning)
                    last = step + 1 == self.total_steps
                    if last or stop.is_set() or self._due(self.config.checkpoint.interval, step):
                        keep = self.config.checkpoint.keep
                        saved = save_checkpoint(self.checkpoints, step + 1, self.policy, optimizer, keep)
                    if stop.is_set() and not last:
                        raise InterruptedRunError(
                            f"stopped after step {step + 1}; saved {saved.path}", "continue with --resume"
                        )
            except BaseException:
                with contextlib.suppress(OSError):  # of a full disk; it would hide the original error
                    log.close()
                raise
            log.close()
        if start < self.total_steps:  # results of an earlier, shorter run
            for stale in (self.predictions_after, self.output / "summary.json", self.output / "report.md"):
                stale.unlink(missing_ok=True)
        try:
            export_model(self.policy, self.output / "model")
        # safetensors raises errors of its own, with the system's message inside.
        except Exception as error:
            raise TrainingError(
                f"the trained model could not be written to {self.output / 'model'}: {error}\n{self._resume_hint()}"
            ) from error

    @property
    def final_records(self) -> Sequence[Record]:
        """The questions of the final evaluation."""
        return self.evaluate_records[: self.config.evaluation.final_questions]

    @property
    def predictions_after(self) -> Path:
        return self.output / "predictions_after.jsonl"

    def evaluate(self, records: Sequence[Record], purpose: str, method: str | None = None) -> list[Prediction]:
        """Answer ``records`` at temperature 1, ``evaluation.samples`` times each.

        ``purpose`` seeds the samples together with the run's seed, and is the bar's title.  ``method`` names the method
        in the predictions (None: the run's).
        """
        title, file = f"answering held-out questions, {purpose}", self.output / PROGRESS
        with StepProgress(len(records), self.show_progress, title=title, file=file) as bar:
            predictions = self._answers(records, purpose, lambda done: bar.show(done))
        label = method or self.method.name
        return [
            replace(prediction, method=label, category=record.category, seed=self.config.seed)
            for prediction, record in zip(predictions, self._repeated(records), strict=True)
        ]

    def _repeated(self, records: Sequence[Record]) -> list[Record]:
        """The record of each prediction."""
        return [record for record in records for _ in range(self.config.evaluation.samples)]

    def initial_evaluation(self, resume_from: Checkpoint | None, *, keep: bool) -> list[Prediction]:
        """Answer :attr:`final_records` before the first step and write ``predictions_before.jsonl``.

        With ``resume_from``, the policy can no longer answer as before the training; ``keep`` uses the answers of an
        earlier session.

        Raises:
            InterruptedRunError: Ctrl-C or SIGTERM; the answers are not saved.
            TrainingError: the policy's probabilities are not finite.
        """
        path = self.output / "predictions_before.jsonl"
        if not self.final_records:
            return []
        if path.exists() and (keep or resume_from is not None):
            known = read_predictions(path)
            if resume_from is not None or len(known) == len(self._repeated(self.final_records)):
                return known
        if resume_from is not None:
            return []
        with interruptible("stopped before the training; a warmed-up model is saved; --resume continues"):
            try:
                predictions = self.evaluate(self.final_records, "before", method="instruct")
            except NoDistributionError as error:
                raise TrainingError(f"evaluation before step 1: {error}") from error
        write_predictions(path, predictions)
        return predictions

    def final_evaluation(self) -> list[Prediction]:
        """Answer :attr:`final_records` and write ``predictions_after.jsonl``; does nothing without records.

        Raises:
            InterruptedRunError: Ctrl-C or SIGTERM; the model is saved, the answers are not.
        """
        if not self.final_records:
            return []
        saved = (
            f"stopped in the evaluation after the training; the trained model is saved in {self.output / 'model'}, "
            f"{self.predictions_after.name} and summary.json are missing"
        )
        go_on = "--resume evaluates again (evaluation.final_questions sets the number of questions)"
        with interruptible(saved, go_on):
            predictions = self.evaluate(self.final_records, "after")
        write_predictions(self.predictions_after, predictions)
        return predictions

    def _answers(self, records: Sequence[Record], purpose: str, progress: Callable[[int], None]) -> list[Prediction]:
        draw, config = generator(self.policy.device, self.config.seed, purpose), self.config
        return predict(
            self.policy,
            records,
            self.grader,
            config.method,
            config.rollout,
            draw,
            progress,
            samples=config.evaluation.samples,
            readings=config.evaluation.readings,
        )

    def _step(
        self, step: int, stage: int, stage_step: int, optimizer: torch.optim.Optimizer, log: RunLog
    ) -> tuple[dict[str, float], dict[str, float]]:
        config, device = self.config, self.policy.device
        records = records_of_step(self.train_records, step, config.rollout.prompts, config.seed)
        started = time.perf_counter()
        draw = generator(device, config.seed, "rollout", step)
        rollout = respond(self.policy, records, config.method, config.rollout, draw, config.rollout.group_size)
        timing = {"seconds/rollout": time.perf_counter() - started}
        grader = self.evaluated_only if config.data.require_evaluated else self.grader
        response_scorer(config.method, self.policy.text, grader)(rollout)
        rollout.give_credit(credit_rule(config.method, stage))
        timing["seconds/grading"] = rollout.grading_seconds
        started = time.perf_counter()
        lr = learning_rate(config.optimizer, stage_step, config.trainer.steps)
        update = update_policy(self.policy, rollout, optimizer, lr, config)
        timing["seconds/update"] = time.perf_counter() - started
        timing["tokens_per_second/rollout"] = float(rollout.lengths.sum()) / timing["seconds/rollout"]
        timing |= {f"grading/{name}": value for name, value in self.grader.metrics().items()}
        timing["grading/unevaluated"] = float(self.evaluated_only.unevaluated)
        metrics = {"stage": float(stage), "lr": lr, **step_metrics(rollout), **update}
        metrics["epoch"] = (step + 1) * config.rollout.prompts / len(self.train_records)

        interval = config.logging.samples_interval
        if self._due(interval, step) or (interval and step == 0):
            log.write_samples(step + 1, sample_rows(rollout, config.logging.samples_prompts))
        if self.evaluate_records and self._due(config.evaluation.interval, step):
            started = time.perf_counter()
            metrics |= self._evaluate_while_training(step, log)
            timing["seconds/evaluation"] = time.perf_counter() - started
        return metrics, timing

    def _evaluate_while_training(self, step: int, log: RunLog) -> dict[str, float]:
        questions = self.evaluate_records[: self.config.evaluation.questions]
        # The same seed each time, so that only the policy changes between evaluations.
        title = f"step {step + 1}, evaluating"
        answers = self._answers(
            questions,
            "evaluate while training",
            lambda done: self._progress.busy(f"{title} {done}/{len(questions)}"),
        )
        if self.config.evaluation.readings or self.config.evaluation.samples > 1:
            write_predictions(self.output / "evaluations" / f"step_{step + 1:06d}.jsonl", answers)
        return self._evaluation_metrics(answers, step + 1, log)

    def _evaluation_metrics(self, answers: Sequence[Prediction], step: int, log: RunLog) -> dict[str, float]:
        """Metrics of the answers to the first ``evaluation.questions`` questions, by the names of metrics.jsonl."""
        answers = answers[: len(self._repeated(self.evaluate_records[: self.config.evaluation.questions]))]
        data = outcomes(answers)
        if log.tensorboard is not None and is_installed("matplotlib"):
            from coca_mindspeed.evaluation.reports.plots import reliability_image  # matplotlib, only where it draws

            image = reliability_image(data, title=f"step {step}")
            log.tensorboard.add_image("eval/reliability", image, step, dataformats="HWC")
        found = calibration_metrics(data.confidence, data.correct, data.tokens_to_confidence)
        scores = {**found.headline(), UNGRADABLE_SHARE: 1 - len(data) / len(answers)}
        if self.config.evaluation.readings:
            scores |= {
                f"{metric}_{reading}": value
                for reading, found in reading_metrics(answers).items()
                if reading != "draw"
                for metric, value in found.items()
            }
            scores["confidence_mass"] = confidence_mass(answers)
        return {f"eval/{name}": math.nan if value is None else float(value) for name, value in scores.items()}

    def _resume_hint(self) -> str:
        saved = list_checkpoints(self.checkpoints)
        if not saved:
            return "no checkpoint was written before it, so the run has to start again"
        return f"the last good checkpoint is {saved[-1].path}; continue with --resume"

    def _due(self, interval: int, step: int) -> bool:
        return interval > 0 and (step + 1) % interval == 0


def _out_of_memory(error: Exception) -> bool:
    """A CPU's allocator raises a plain RuntimeError."""
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "DefaultCPUAllocator" in str(error)
