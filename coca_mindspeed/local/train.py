"""The local engine's loop (the paper's Algorithm 1): sample, score, give credit, update, log, save.

How a run differs from the paper (arXiv 2603.05881), apart from the options of docs/method.md:

1. Invalid responses have a format advantage of their own (``method.separate_format``; false: the paper's form).
2. Ungradable answers take no part in GESR and advantages; a group with fewer than two gradable answers trains nothing.
3. In training, an answer that only restates the question earns nothing (``data.require_evaluated``; false: the paper's
   form).
4. Each stage of a method takes ``trainer.steps`` and starts with a new optimizer.
"""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from coca_mindspeed.algorithm.credit import CreditRule
from coca_mindspeed.config.schema import RunConfig
from coca_mindspeed.data.order import QuestionOrder
from coca_mindspeed.data.records import Record
from coca_mindspeed.errors import TrainingError
from coca_mindspeed.evaluation.predictions import Prediction
from coca_mindspeed.grading.verdict import MeasuredGrader
from coca_mindspeed.local.checkpoint import (
    export_best,
    export_model,
    load_optimizer_state,
    resume_hint,
    save_checkpoint,
)
from coca_mindspeed.local.evaluation import HeldOut
from coca_mindspeed.local.inverse_cdf import NoDistributionError
from coca_mindspeed.local.logging import LogError, RunLog
from coca_mindspeed.local.policy import Policy, is_out_of_memory
from coca_mindspeed.local.respond import respond, step_metrics
from coca_mindspeed.local.run_directory import BEST_MODEL, Checkpoint
from coca_mindspeed.local.schedule import generator, learning_rate, question_order
from coca_mindspeed.local.update import NotFiniteError, build_optimizer, update_policy
from coca_mindspeed.scoring.best import BestValue
from coca_mindspeed.scoring.health import HealthWarnings, rewards_confidence
from coca_mindspeed.scoring.metrics import CONFIDENCE_REWARD, TIMES_ASKED, sight_metrics, values
from coca_mindspeed.scoring.responses import ResponseScorer, training_scorer
from coca_mindspeed.scoring.rollout import Credited, confidence_log_probs
from coca_mindspeed.scoring.settings import dump_is_due, scoring_settings
from coca_mindspeed.utils.process import InterruptedRunError, interruptible, stop_request
from coca_mindspeed.utils.progress import TrainingProgress
from coca_mindspeed.utils.saving import CheckpointTimer

_MEMORY_ADVICE = (
    "trainer.microbatch_tokens or trainer.microbatch_prompts bounds the memory of an update, "
    "model.gradient_checkpointing=true lowers it, and rollout.batch_responses bounds a rollout; "
    "coca-mindspeed check says how much each needs, and --resume accepts the change"
)


class _Clock:
    """Seconds of a step's parts, by the names of timing.jsonl."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, name: str, seconds: float | None = None) -> None:
        """The time since the last part, or ``seconds`` of it."""
        now = time.perf_counter()
        self.seconds[f"seconds/{name}"] = now - self._last if seconds is None else seconds
        self._last = now


@dataclass
class StepResult:
    """A finished update: its responses, and what the log gets.  ``step`` counts from 0."""

    step: int
    credited: Credited
    metrics: dict[str, Any]
    clock: _Clock
    timing: dict[str, float] = field(default_factory=dict)

    @property
    def number(self) -> int:
        return self.step + 1


AfterStep = Callable[[StepResult], None]


@dataclass
class Trainer:
    """Trains a policy in place; ``output`` is the run's directory."""

    config: RunConfig
    policy: Policy
    grader: MeasuredGrader
    records: Sequence[Record]
    held_out: HeldOut
    output: Path
    run_id: str
    show_progress: bool = True

    unevaluated: int = field(default=0, init=False)  # right answers of this process that only restate their question

    def run(self, resume_from: Checkpoint | None = None, baseline: Sequence[Prediction] = ()) -> None:
        """Train to the last step, from the start or from a checkpoint whose weights :attr:`policy` holds.

        ``baseline``: answers before the first step, whose metrics are logged as step 0.  Raises TrainingError for a
        loss that is not finite, exhausted memory or a full disk, and InterruptedRunError if stopped; the state is
        saved.
        """
        config, policy = self.config, self.policy
        start, total = resume_from.step if resume_from else 0, config.total_steps
        optimizer = build_optimizer(policy, config.optimizer)
        if resume_from is not None and start % config.trainer.steps:  # in the middle of a stage
            optimizer.load_state_dict(load_optimizer_state(resume_from, policy.device))
        log = RunLog(self.output, config.logging, config.model_dump(mode="json"), self.run_id, resume_step=start)
        hidden = () if rewards_confidence(config.method.training_method) else (CONFIDENCE_REWARD,)
        interval = self._evaluation_interval
        progress = TrainingProgress(total, self.show_progress, start, interval=interval, hidden=hidden)
        after_step = self._after_step(log, progress, baseline)
        timer = CheckpointTimer(config.checkpoint.minutes, start)
        with (
            interruptible("stopped in the middle of a step", self._resume_hint),
            stop_request() as stop,
            progress,
            _closing(log),
        ):
            for step in range(start, total):
                if step % config.trainer.steps == 0 and step > start:  # a new stage starts with a new optimizer
                    optimizer = build_optimizer(policy, config.optimizer)
                with self._errors_of_step(step + 1):
                    result = self.step(step, optimizer)
                    for follow in after_step:
                        follow(result)
                last, stopping = step + 1 == total, stop.is_set()  # a signal from here on stops after the next step
                if last or stopping or _due(config.checkpoint.interval, step) or timer.is_due(step + 1):
                    saved = save_checkpoint(
                        self.output / "checkpoints", step + 1, policy, optimizer, config.checkpoint.keep
                    )
                    timer.saved(step + 1)
                if stopping and not last:
                    raise InterruptedRunError(
                        f"stopped after step {step + 1}; saved {saved.path}", "continue with --resume"
                    )
        if start < total:
            self._remove_earlier_results()
        self._export()

    def step(self, step: int, optimizer: torch.optim.Optimizer) -> StepResult:
        """Sample, score, give credit and update once; ``step`` counts from 0."""
        config, policy, clock = self.config, self.policy, _Clock()
        stage, stage_step = divmod(step, config.trainer.steps)
        asked = self._questions.of_step(step)
        draw = generator(policy.device, config.seed, "rollout", step)
        system_prompt, group_size = config.method.system_prompt, config.rollout.group_size
        rollout = respond(policy, asked, system_prompt, config.rollout, draw, group_size)
        clock.lap("rollout")
        rule, graded = CreditRule(config.method, stage), self._scorer.for_training(self._scorer(rollout, asked))
        log_probs = confidence_log_probs(rule, rollout.log_probs, graded.segment_ends)
        credited = graded.give_credit(rule, group_size, log_probs=log_probs)
        self.unevaluated += graded.unevaluated
        clock.lap("grading", graded.grading_seconds)
        lr = learning_rate(config.optimizer, stage_step, config.trainer.steps)
        updated = update_policy(policy, rollout, credited, optimizer, lr, config)
        clock.lap("update")
        metrics = {"stage": float(stage), "lr": lr, **step_metrics(rollout, credited), **updated}
        metrics |= values(sight_metrics(graded, self._questions.seen(step)))
        metrics[TIMES_ASKED] = self._questions.times_asked(step)
        metrics["epoch"] = (step + 1) * config.rollout.prompts / len(self.records)
        return StepResult(step, credited, metrics, clock)

    def _after_step(self, log: RunLog, progress: TrainingProgress, baseline: Sequence[Prediction]) -> list[AfterStep]:
        """Return the functions that follow each step, in this order."""
        config, health, metric = self.config, HealthWarnings(), self.config.checkpoint.best

        def write_samples(done: StepResult) -> None:
            if dump_is_due(config.logging.samples_interval, done.number):
                shown = min(config.logging.samples_prompts, config.rollout.prompts) * config.rollout.group_size
                log.write_samples(done.number, done.credited.rows(range(shown)))

        def evaluate(done: StepResult) -> None:
            if _due(self._evaluation_interval, done.step):
                done.metrics |= self.held_out.while_training(done.number, log, progress.busy)
                done.clock.lap("evaluation")

        def write_metrics(done: StepResult) -> None:
            if done.step == 0 and baseline:
                log.write(0, self.held_out.metrics(baseline, 0, log), {})
            tokens, seconds = float(done.credited.scored.lengths.sum()), done.clock.seconds
            done.timing = {
                **seconds,
                "tokens_per_second/rollout": tokens / seconds["seconds/rollout"],
                **{f"grading/{name}": value for name, value in self.grader.metrics().items()},
                "grading/unevaluated": float(self.unevaluated),
            }
            log.write(done.number, done.metrics, done.timing)

        def show_progress(done: StepResult) -> None:
            progress.advance(done.number, done.metrics, done.timing)

        def warn(done: StepResult) -> None:
            if warning := health.after_step(done.number, done.metrics, config.method.training_method):
                progress.note(warning)

        followers: list[AfterStep] = [write_samples, evaluate, write_metrics, show_progress, warn]
        if metric is not None:
            best = BestValue(self.output / BEST_MODEL, metric)

            def keep_the_best(done: StepResult) -> None:
                if best.improves(done.metrics):
                    export_best(best, done.number, self.policy, done.metrics)

            followers.append(keep_the_best)
        return followers

    @property
    def _evaluation_interval(self) -> int:
        return self.config.evaluation.interval if self.held_out.records else 0

    @cached_property
    def _scorer(self) -> ResponseScorer:
        return training_scorer(scoring_settings(self.config), self.policy.text, self.grader)

    @cached_property
    def _questions(self) -> QuestionOrder:
        return question_order(self.records, self.config.rollout.prompts, self.config.seed)

    def _remove_earlier_results(self) -> None:
        """Remove the results of an earlier, shorter run."""
        results = [self.output / name for name in ("summary.json", "report.md", "report.html")]
        for stale in (self.held_out.predictions_after, *results):
            stale.unlink(missing_ok=True)

    def _export(self) -> None:
        try:
            export_model(self.policy, self.output / "model")
        # safetensors raises errors of its own, with the system's message inside.
        except Exception as error:
            raise TrainingError(
                f"the trained model could not be written to {self.output / 'model'}: {error}\n{self._resume_hint()}"
            ) from error

    @contextlib.contextmanager
    def _errors_of_step(self, step: int) -> Iterator[None]:
        """Add the step and the last checkpoint to expected errors."""
        try:
            yield
        except (NoDistributionError, NotFiniteError, LogError) as error:
            raise TrainingError(f"step {step}: {error}\n{self._resume_hint()}") from error
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            what = (str(error) or type(error).__name__).splitlines()[0]
            raise TrainingError(
                f"step {step}: out of memory ({what})\n{_MEMORY_ADVICE}\n{self._resume_hint()}"
            ) from error

    def _resume_hint(self) -> str:
        return resume_hint(self.output / "checkpoints")


@contextlib.contextmanager
def _closing(log: RunLog) -> Iterator[None]:
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):  # of a full disk; it would hide the original error
            log.close()
        raise
    log.close()


def _due(interval: int, step: int) -> bool:
    return interval > 0 and (step + 1) % interval == 0
