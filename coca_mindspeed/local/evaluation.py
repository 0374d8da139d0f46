"""Answers of a run besides its rollouts: to held-out questions before, while and after it trains, and the preflight.

The preflight samples a few responses before the first step, and refuses a run that could not learn from them.  Its
questions and tokens are drawn by seeds of their own, so the run itself does not change.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from coca_mindspeed.config.prompt_form import PromptForm
from coca_mindspeed.config.schema import RunConfig
from coca_mindspeed.data.prompts import form_digest
from coca_mindspeed.data.records import Record
from coca_mindspeed.errors import Problem, TrainingError
from coca_mindspeed.evaluation.metrics import calibration_metrics
from coca_mindspeed.evaluation.predictions import (
    UNGRADABLE_SHARE,
    Prediction,
    outcomes,
    read_predictions,
    write_predictions,
)
from coca_mindspeed.grading.registry import misfit_warnings
from coca_mindspeed.grading.verdict import Grader, Outcome, Verdict
from coca_mindspeed.local.inverse_cdf import NoDistributionError
from coca_mindspeed.local.logging import RunLog
from coca_mindspeed.local.policy import Policy
from coca_mindspeed.local.respond import predict, respond
from coca_mindspeed.local.sampler import Rollout
from coca_mindspeed.local.schedule import derived_seed, generator, question_order
from coca_mindspeed.scoring.metrics import values
from coca_mindspeed.scoring.responses import held_out_gap, training_scorer
from coca_mindspeed.scoring.rollout import Graded
from coca_mindspeed.scoring.settings import scoring_settings
from coca_mindspeed.utils.console import duration, one_line
from coca_mindspeed.utils.directories import PROGRESS
from coca_mindspeed.utils.packages import is_installed
from coca_mindspeed.utils.process import interruptible
from coca_mindspeed.utils.progress import StepProgress


@dataclass(frozen=True)
class HeldOut:
    """The held-out questions (there may be none), each answered ``evaluation.samples`` times at temperature 1."""

    config: RunConfig
    policy: Policy
    grader: Grader
    records: Sequence[Record]
    output: Path
    show_progress: bool = True
    form: PromptForm | None = None  # of the training's prompts, by which predictions name theirs

    @property
    def final_records(self) -> Sequence[Record]:
        """The questions of the evaluations before and after the training."""
        return self.records[: self.config.evaluation.final_questions]

    @property
    def predictions_after(self) -> Path:
        return self.output / "predictions_after.jsonl"

    def evaluate(self, records: Sequence[Record], purpose: str, *, trained: bool = True) -> list[Prediction]:
        """Answer ``records``; ``purpose`` seeds the samples and titles the bar.

        The answers name the run's method if the policy is ``trained`` by it.
        """
        title, file = f"answering held-out questions, {purpose}", self.output / PROGRESS
        with StepProgress(len(records), self.show_progress, title=title, file=file) as bar:
            predictions = self._answers(records, purpose, lambda done: bar.show(done))
        label = self.config.method.label if trained else None
        return [
            replace(prediction, method=label, category=record.category, seed=self.config.seed)
            for prediction, record in zip(predictions, self._repeated(records), strict=True)
        ]

    def before(self, *, trained: bool, keep: bool) -> list[Prediction]:
        """Answer :attr:`final_records` before the first step and write ``predictions_before.jsonl``.

        Answers of an earlier session are used if the policy is ``trained`` already, or with ``keep``.  Raises
        InterruptedRunError if stopped, and TrainingError if the policy's probabilities are not finite.
        """
        path = self.output / "predictions_before.jsonl"
        if not self.final_records:
            return []
        if path.exists() and (keep or trained):
            stored = read_predictions(path)
            if trained or len(stored) == len(self._repeated(self.final_records)):
                return stored
        if trained:
            return []
        with interruptible("stopped before the training; a warmed-up model is saved; --resume continues"):
            try:
                predictions = self.evaluate(self.final_records, "before", trained=False)
            except NoDistributionError as error:
                raise TrainingError(f"evaluation before step 1: {error}") from error
        write_predictions(path, predictions)
        return predictions

    def after(self) -> list[Prediction]:
        """Answer :attr:`final_records` and write ``predictions_after.jsonl``; InterruptedRunError if stopped."""
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

    def while_training(self, step: int, log: RunLog, show: Callable[[str], None]) -> dict[str, float]:
        """Answer the first ``evaluation.questions`` questions after ``step``, and return their metrics."""
        questions = self.records[: self.config.evaluation.questions]
        # The same seed each time, so that only the policy changes between evaluations.
        answers = self._answers(
            questions, "evaluate while training", lambda done: show(f"step {step}, evaluating {done}/{len(questions)}")
        )
        if self.config.evaluation.samples > 1:
            write_predictions(self.output / "evaluations" / f"step_{step:06d}.jsonl", answers)
        return self.metrics(answers, step, log)

    def metrics(self, answers: Sequence[Prediction], step: int, log: RunLog) -> dict[str, float]:
        """Metrics of the answers to the first ``evaluation.questions`` questions, by the names of metrics.jsonl."""
        answers = answers[: len(self._repeated(self.records[: self.config.evaluation.questions]))]
        data = outcomes(answers)
        if log.tensorboard is not None and is_installed("matplotlib"):
            from coca_mindspeed.evaluation.plots import reliability_image  # matplotlib, only where it draws

            image = reliability_image(data, title=f"step {step}")
            log.tensorboard.add_image("eval/reliability", image, step, dataformats="HWC")
        calibration = calibration_metrics(data.confidence, data.correct, data.tokens_to_confidence)
        scores = {**calibration.headline(), UNGRADABLE_SHARE: 1 - len(data) / len(answers)}
        named = {f"eval/{name}": math.nan if value is None else float(value) for name, value in scores.items()}
        return {**named, **values(held_out_gap(answers))}

    def _answers(self, records: Sequence[Record], purpose: str, progress: Callable[[int], None]) -> list[Prediction]:
        config = self.config
        predictions = predict(
            self.policy,
            records,
            self.grader,
            config.method,
            config.rollout,
            generator(self.policy.device, config.seed, purpose),
            progress,
            samples=config.evaluation.samples,
        )
        if (form := self.form) is None:
            return predictions
        system_prompt = config.method.system_prompt
        return [
            replace(prediction, form=form_digest(record, system_prompt, form))
            for prediction, record in zip(predictions, self._repeated(records), strict=True)
        ]

    def _repeated(self, records: Sequence[Record]) -> list[Record]:
        """The record of each prediction."""
        return [record for record in records for _ in range(self.config.evaluation.samples)]


_STAGE = "preflight"  # part of derived seeds
_LEAST_VALID = 0.5
_LONGEST_TEXT = 200  # characters shown of a question or response


@dataclass(frozen=True)
class Preflight:
    """Responses, one to each of some training questions; they are graded unless some are cut off early."""

    config: RunConfig
    rollout: Rollout
    graded: Graded
    seconds: float  # that sampling took

    @property
    def valid(self) -> int:
        return int((~self.graded.stated.isnan()).sum())

    @property
    def cut_off(self) -> int:
        """Responses that are cut off at :func:`preflight_tokens`, below ``rollout.max_new_tokens``."""
        return _cut_off(self.rollout, self.config)

    @property
    def time(self) -> str:
        """How long the run's rollouts take at most, by the tokens a second of these responses."""
        config, lengths = self.config, self.rollout.lengths
        responses = config.total_steps * config.rollout.prompts * config.rollout.group_size
        ended = bool(self.rollout.finished.all())
        tokens = float(lengths.double().mean()) if ended else float(config.rollout.max_new_tokens)
        rate = float(lengths.sum()) / self.seconds
        return (
            f"up to {duration(responses * tokens / rate)} of sampling: {responses:,} responses of "
            f"{'' if ended else 'up to '}{tokens:,.0f} tokens at {rate:,.0f} tokens/s, as the preflight samples "
            f"{len(lengths)} at once; updates and evaluations come on top"
        )

    def __str__(self) -> str:
        """The shares of valid confidences and right answers, the worst and the best response, and advice."""
        records, rows, cut_off = self.graded.records, self.rows(), self.cut_off
        count, right = len(records), int(self.graded.correct.nansum())
        graded = f"{right} answers are right ({right / count:.0%})"
        if cut_off:
            graded = (
                f"{cut_off} are cut off at {preflight_tokens(self.config)} tokens, so the share of right answers, and "
                "whether the grader fits them, are unknown"
            )
        lines = [
            f"{count} responses to training questions, sampled before the first step: {self.valid} state a valid "
            f"confidence ({self.valid / count:.0%}), {graded}"
        ]
        order = sorted(range(count), key=lambda i: (rows[i]["confidence"] is not None, bool(rows[i]["correct"])))
        for row in (rows[i] for i in dict.fromkeys((order[0], order[-1]))):
            stated = "no valid confidence" if row["confidence"] is None else f"confidence {row['confidence']:g}"
            lines.append(f"  question: {_shorten(row['question'])}")
            verdict = "not graded" if cut_off else row["verdict"]
            lines.append(f"  response: {_shorten(row['response'])}  [{stated}, {verdict}]")
        if cut_off:
            return "\n".join(lines)
        # A grader may find many answers wrong although they name the gold answer.
        grader, options = self.config.data.grader, self.config.data.grader_options
        option = f"data.grader_options.{'factual.' * (grader == 'auto')}match=contains"
        fixes = {
            "factual": f"set {option}, or another metadata.instruction in the records",
            "math": 'set "category": "factual" in the records, and data.grader=auto',
        }
        warnings = misfit_warnings(grader, options, records, self.graded.answers, self.graded.verdicts, fixes)
        return "\n".join([*lines, *warnings])

    def rows(self) -> list[dict[str, Any]]:
        """Rows of a samples dump."""
        return [self.graded.row(row) for row in range(len(self.graded.records))]

    def problems(self) -> list[Problem]:
        """A problem if fewer than half of the responses state a valid confidence."""
        config, warm_up, count = self.config, self.config.warm_up, len(self.graded.records)
        if self.valid >= _LEAST_VALID * count:
            return []
        if warm_up.records is not None or config.model.path is None:
            key, value = "warm_up.steps", warm_up.steps
            fix = f"set warm_up.steps={2 * warm_up.steps}, or a larger warm_up.lr"
        else:
            key, value = "warm_up.records", None
            fix = (
                f"add a format warm-up: warm_up.records={config.data.train or 'FILE'} (or other records); for a short "
                "first run also write laptop for local (docs/quickstart.md)"
            )
        expected = f"{self.valid} of {count} sampled responses state a valid confidence, expected at least half"
        fix += "; evaluation.preflight=0 trains anyway (docs/training.md, format warm-up)"
        return [Problem("no-format", key, value, expected, fix)]


_SHORT = 64  # tokens, by which a confidence is stated that comes first


def preflight_tokens(config: RunConfig) -> int:
    """The most tokens of a response of the preflight."""
    longest, position = config.rollout.max_new_tokens, config.method.training_method.confidence_position
    return min(_SHORT, longest) if position == "first" else longest


def _cut_off(rollout: Rollout, config: RunConfig) -> int:
    if preflight_tokens(config) == config.rollout.max_new_tokens:
        return 0
    return int((~rollout.finished).sum())


def run_preflight(
    policy: Policy, train: Sequence[Record], grader: Grader, config: RunConfig, show_progress: bool = False
) -> Preflight:
    """Sample responses to training questions, and grade them if none is cut off at :func:`preflight_tokens`.

    Raises TrainingError if probabilities are not finite.
    """
    settings, count, longest = config.rollout, config.evaluation.preflight, preflight_tokens(config)
    at_once = min(settings.prompts * settings.group_size, settings.batch_responses or count)
    records = question_order(train, count, derived_seed(config.seed, _STAGE)).of_step(0)
    title = f"sampling {count} responses of at most {longest} tokens before the first step, tokens"
    started = time.perf_counter()
    try:
        with StepProgress(-(-count // at_once) * longest, show_progress, title=title) as bar:
            rollout = respond(
                policy,
                records,
                config.method.system_prompt,
                settings.model_copy(update={"batch_responses": at_once, "max_new_tokens": longest}),
                generator(policy.device, config.seed, _STAGE),
                group_size=1,
                progress=lambda tokens: bar.show(tokens),
            )
    except NoDistributionError as error:
        raise TrainingError(f"sampling before step 1: {error}") from error
    seconds = time.perf_counter() - started
    score = training_scorer(scoring_settings(config), policy.text, grader)
    if _cut_off(rollout, config):
        score = replace(score, grader=_NotGraded(f"the preflight cuts responses off at {longest} tokens"))
    return Preflight(config, rollout, score.for_training(score(rollout, records)), seconds)


@dataclass(frozen=True)
class _NotGraded:
    """A grader that grades nothing, and its reason."""

    reason: str

    def grade(self, records: Sequence[Record], answers: Sequence[str]) -> list[Verdict]:
        return [Verdict(Outcome.UNGRADABLE, self.reason)] * len(answers)

    def close(self) -> None: ...


def _shorten(text: str) -> str:
    line = one_line(text)
    return line if len(line) <= _LONGEST_TEXT else f"{line[:_LONGEST_TEXT]}..."
