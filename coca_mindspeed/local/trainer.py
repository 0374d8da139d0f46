"""The training loop: rollout, grade, reward, advantage, update, in the order of the paper's Algorithm 1."""

import math
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from coca_mindspeed.algorithm.rewards import training_method
from coca_mindspeed.config.schema import RunConfig
from coca_mindspeed.data.records import Record
from coca_mindspeed.errors import TrainingError
from coca_mindspeed.evaluation.metrics import CalibrationMetrics, calibration_metrics
from coca_mindspeed.evaluation.plots import reliability_image
from coca_mindspeed.evaluation.predictions import Prediction, outcomes
from coca_mindspeed.grading.evaluated import EvaluatedOnly
from coca_mindspeed.grading.verdict import MeasuredGrader
from coca_mindspeed.local.checkpoint import (
    Checkpoint,
    checkpoint_bytes,
    export_model,
    list_checkpoints,
    remove_leftovers,
    save_checkpoint,
)
from coca_mindspeed.local.evaluate import predict
from coca_mindspeed.local.experience import (
    Experience,
    experience_metrics,
    respond_and_grade,
    reward_and_advantage,
    sample_rows,
)
from coca_mindspeed.local.interrupt import stop_request
from coca_mindspeed.local.policy import Policy
from coca_mindspeed.local.progress import TrainingProgress
from coca_mindspeed.local.run_log import RunLog
from coca_mindspeed.local.schedule import generator, learning_rate, records_of_step
from coca_mindspeed.local.update import NotFiniteError, update_policy


class InterruptedRunError(TrainingError):
    """The run was asked to stop and did so, with a checkpoint."""

    exit_code = 130  # as the shell reports Ctrl-C


@dataclass
class Trainer:
    """Trains a policy in place.

    Attributes:
        config: the run.
        policy: what is trained.
        grader: says who is right; in training, with ``data.require_evaluated``, restated questions earn nothing.
        train_records: questions to train on.
        evaluate_records: held-out questions; may be empty where nothing is evaluated.
        output: the run's directory.
        show_progress: whether to draw a progress bar.
    """

    config: RunConfig
    policy: Policy
    grader: MeasuredGrader
    train_records: Sequence[Record]
    evaluate_records: Sequence[Record]
    output: Path
    show_progress: bool = True

    def __post_init__(self) -> None:
        self.method = training_method(self.config.method.name)
        self.evaluated_only = EvaluatedOnly(self.grader)
        self.checkpoints = self.output / "checkpoints"
        self.total_steps = self.config.trainer.steps * len(self.method.stages)

    def run(self, resume_from: Checkpoint | None = None) -> None:
        """Train from the start or from a checkpoint, whose weights :attr:`policy` must hold, to the last step.

        Raises:
            TrainingError: a loss or gradient is not finite, or a file cannot be written.
            InterruptedRunError: Ctrl-C or SIGTERM; the state is saved.
        """
        start = resume_from.step if resume_from else 0
        self._check_space()
        remove_leftovers(self.checkpoints)
        optimizer = self._optimizer()
        if resume_from is not None and start % self.config.trainer.steps:  # a new stage starts with a new optimizer
            optimizer.load_state_dict(resume_from.optimizer_state(self.policy.device))
        log = RunLog(self.output, self.config.logging, self.config.model_dump(mode="json"), resume_step=start)
        progress = TrainingProgress(self.total_steps, self.show_progress, start)
        with stop_request() as stop, progress:
            try:
                for step in range(start, self.total_steps):
                    stage, stage_step = divmod(step, self.config.trainer.steps)
                    if stage_step == 0 and step > start:
                        optimizer = self._optimizer()
                    metrics, timing = self._step(step, stage, stage_step, optimizer, log)
                    log.write(step + 1, metrics, timing)
                    progress.advance(step + 1, metrics, timing)
                    last = step + 1 == self.total_steps
                    if last or stop or self._due(self.config.checkpoint.interval, step):
                        settings = {"config": self.config.model_dump(mode="json")}
                        keep = self.config.checkpoint.keep
                        saved = save_checkpoint(self.checkpoints, step + 1, self.policy, optimizer, settings, keep)
                    if stop and not last:
                        raise InterruptedRunError(
                            f"stopped after step {step + 1}; saved {saved.path}; go on with --resume"
                        )
            finally:
                log.close()
        export_model(self.policy, self.output / "model")

    def evaluate(self, records: Sequence[Record], purpose: str) -> list[Prediction]:
        """Answer ``records`` once each at temperature 1; ``purpose`` and the run's seed draw the samples."""
        draw = generator(self.policy.device, self.config.seed, purpose)
        config = self.config
        return predict(self.policy, records, self.grader, self.method, config.method, config.rollout, draw)

    def _step(
        self, step: int, stage: int, stage_step: int, optimizer: torch.optim.Optimizer, log: RunLog
    ) -> tuple[dict[str, float], dict[str, float]]:
        config, device = self.config, self.policy.device
        records = records_of_step(self.train_records, step, config.rollout.prompts, config.seed)
        graded = respond_and_grade(
            self.policy,
            records,
            self.evaluated_only if config.data.require_evaluated else self.grader,
            self.method,
            config.method,
            config.rollout,
            generator(device, config.seed, "rollout", step),
            config.rollout.group_size,
        )
        experience = reward_and_advantage(graded, self.method, config.method, stage, device)
        started = time.perf_counter()
        lr = learning_rate(config.optimizer, stage_step, config.trainer.steps)
        update = self._update(step, experience, optimizer, lr)
        timing = {f"seconds/{name}": seconds for name, seconds in graded.seconds.items()}
        timing["seconds/update"] = time.perf_counter() - started
        timing["tokens_per_second/rollout"] = float(graded.samples.lengths.sum()) / graded.seconds["rollout"]
        timing |= {f"grading/{name}": value for name, value in self.grader.metrics().items()}
        timing["grading/unevaluated"] = float(self.evaluated_only.unevaluated)
        metrics = {"stage": float(stage), "lr": lr, **experience_metrics(experience), **update}
        metrics["epoch"] = (step + 1) * config.rollout.prompts / len(self.train_records)

        if self._due(config.logging.samples_interval, step):
            log.write_samples(step + 1, sample_rows(experience, config.logging.samples_prompts))
        if self.evaluate_records and self._due(config.evaluation.interval, step):
            started = time.perf_counter()
            scores = self._evaluate_while_training(step, log)
            metrics |= {f"eval/{k}": math.nan if v is None else float(v) for k, v in scores.headline().items()}
            timing["seconds/evaluation"] = time.perf_counter() - started
        return metrics, timing

    def _update(
        self, step: int, experience: Experience, optimizer: torch.optim.Optimizer, lr: float
    ) -> dict[str, float]:
        try:
            return update_policy(self.policy, experience, optimizer, lr, self.config)
        except NotFiniteError as error:
            saved = list_checkpoints(self.checkpoints)
            last = f"the last good checkpoint is {saved[-1].path}" if saved else "no checkpoint was written before it"
            raise TrainingError(f"step {step + 1}: {error}; {last}") from error

    def _evaluate_while_training(self, step: int, log: RunLog) -> CalibrationMetrics:
        questions = self.evaluate_records[: self.config.evaluation.questions]
        # The same draw each time: what changes between two evaluations is the policy.
        data = outcomes(self.evaluate(questions, "evaluate while training"))
        if log.tensorboard is not None:
            image = reliability_image(data.confidence, data.correct, title=f"step {step + 1}")
            log.tensorboard.add_image("eval/reliability", image, step + 1, dataformats="HWC")
        return calibration_metrics(data.confidence, data.correct, data.tokens_to_confidence)

    def _due(self, interval: int, step: int) -> bool:
        return interval > 0 and (step + 1) % interval == 0

    def _optimizer(self) -> torch.optim.Optimizer:
        config = self.config.optimizer
        return torch.optim.AdamW(
            self.policy.model.parameters(),
            lr=config.lr,
            betas=config.betas,
            eps=config.eps,
            weight_decay=config.weight_decay,
            fused=True,  # one kernel for all parameters; on a CPU too
        )

    def _check_space(self) -> None:
        """Say before the first step what can be known then: an unwritable directory, a disk that is too small."""
        try:
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            probe = self.checkpoints / ".writable"
            probe.write_bytes(b"coca")
            probe.unlink()
        except OSError as error:
            raise TrainingError(f"--output {self.output}: cannot be written: {error.strerror}") from error
        # While a new checkpoint is written, the ones that are kept are still there; the export comes last.
        size = checkpoint_bytes(self.policy)
        existing = len(list_checkpoints(self.checkpoints))
        needed = size * max(1, self.config.checkpoint.keep + 1 - existing) + size // 3
        free = shutil.disk_usage(self.checkpoints).free
        if free < needed:
            raise TrainingError(
                f"--output {self.output}: {free / 2**20:.0f} MiB are free, about {needed / 2**20:.0f} MiB are "
                f"needed for {self.config.checkpoint.keep + 1} checkpoints of {size / 2**20:.0f} MiB and the exported "
                "model; make room or lower checkpoint.keep"
            )
