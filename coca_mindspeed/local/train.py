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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from coca_mindspeed.config.schema import RunConfig
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
from coca_mindspeed.local.respond import respond, sample_rows, step_metrics
from coca_mindspeed.local.run_directory import BEST_MODEL, Checkpoint
from coca_mindspeed.local.schedule import first_sight, generator, learning_rate, records_of_step
from coca_mindspeed.local.update import NotFiniteError, build_optimizer, update_policy
from coca_mindspeed.scoring.metrics import TIMES_ASKED, BestValue, HealthWarnings, sight_metrics, values
from coca_mindspeed.scoring.responses import credit_rule, response_scorer
from coca_mindspeed.scoring.rollout import confidence_log_probs
from coca_mindspeed.utils.process import InterruptedRunError, interruptible, stop_request
from coca_mindspeed.utils.progress import TrainingProgress

_MEMORY_ADVICE = (
    "trainer.microbatch_tokens or trainer.microbatch_prompts bounds the memory of an update, "
    "model.gradient_checkpointing=true lowers it, and rollout.batch_responses bounds a rollout; "
    "coca-mindspeed check says how much each needs, and --resume accepts the change"
)


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
        interval = config.evaluation.interval if self.held_out.records else 0
        progress = TrainingProgress(total, self.show_progress, start, interval=interval)
        metric = config.checkpoint.best
        best = None if metric is None else BestValue(self.output / BEST_MODEL, metric)
        health, unevaluated = HealthWarnings(), 0
        sights = first_sight(self.records, config.rollout.prompts, config.seed)
        score = response_scorer(
            config.method, policy.text, self.grader, require_evaluated=config.data.require_evaluated
        )
        with (
            interruptible("stopped in the middle of a step", self._resume_hint),
            stop_request() as stop,
            progress,
            _closing(log),
        ):
            for step in range(start, total):
                stage, stage_step = divmod(step, config.trainer.steps)
                if stage_step == 0 and step > start:  # a new stage starts with a new optimizer
                    optimizer = build_optimizer(policy, config.optimizer)
                with self._errors_of_step(step + 1):
                    clock = _Clock()
                    asked = records_of_step(self.records, step, config.rollout.prompts, config.seed)
                    draw = generator(policy.device, config.seed, "rollout", step)
                    rollout = respond(policy, asked, config.method, config.rollout, draw, config.rollout.group_size)
                    clock.lap("rollout")
                    rule, scored = credit_rule(config.method, stage), score.for_training(score(rollout))
                    log_probs = confidence_log_probs(rule, scored.log_probs, scored.segment_ends)
                    scored.give_credit(rule, config.rollout.group_size, log_probs=log_probs)
                    unevaluated += rollout.unevaluated
                    clock.lap("grading", rollout.grading_seconds)
                    lr = learning_rate(config.optimizer, stage_step, config.trainer.steps)
                    updated = update_policy(policy, rollout, optimizer, lr, config)
                    clock.lap("update")

                    metrics = {"stage": float(stage), "lr": lr, **step_metrics(rollout), **updated}
                    metrics |= values(sight_metrics(rollout, sights.seen((r.question for r in asked), step)))
                    metrics[TIMES_ASKED] = sights.times_asked(step)
                    metrics["epoch"] = (step + 1) * config.rollout.prompts / len(self.records)
                    if (every := config.logging.samples_interval) and (step == 0 or _due(every, step)):
                        log.write_samples(step + 1, sample_rows(rollout, config.logging.samples_prompts))
                    if _due(interval, step):
                        metrics |= self.held_out.while_training(step + 1, log, progress.busy)
                        clock.lap("evaluation")
                    timing = clock.seconds | {
                        "tokens_per_second/rollout": float(rollout.lengths.sum()) / clock.seconds["seconds/rollout"],
                        **{f"grading/{name}": value for name, value in self.grader.metrics().items()},
                        "grading/unevaluated": float(unevaluated),
                    }
                    if step == 0 and baseline:
                        log.write(0, self.held_out.metrics(baseline, 0, log), {})
                    log.write(step + 1, metrics, timing)
                progress.advance(step + 1, metrics, timing)
                if warning := health.after_step(step + 1, metrics):
                    progress.note(warning)

                last, stopping = step + 1 == total, stop.is_set()  # a signal from here on stops after the next step
                if best is not None and best.improves(metrics):
                    export_best(best, step + 1, policy, metrics)
                if last or stopping or _due(config.checkpoint.interval, step):
                    saved = save_checkpoint(
                        self.output / "checkpoints", step + 1, policy, optimizer, config.checkpoint.keep
                    )
                if stopping and not last:
                    raise InterruptedRunError(
                        f"stopped after step {step + 1}; saved {saved.path}", "continue with --resume"
                    )
        if start < total:  # results of an earlier, shorter run
            results = [self.output / name for name in ("summary.json", "report.md", "report.html")]
            for stale in (self.held_out.predictions_after, *results):
                stale.unlink(missing_ok=True)
        try:
            export_model(policy, self.output / "model")
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
