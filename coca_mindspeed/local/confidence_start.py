"""A supervised start of the confidences: a model is shown, as what to state, how often its own answers were right.

An option of ours and no part of the paper's method (docs/real_model.md).  Training questions are asked in groups, as a
step of the training asks them; then the model imitates its own responses, each with its group's success rate in the
place of what it had stated.  The answers are its own, so that they are not what is taught.
"""

import shutil
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from coca_mindspeed.algorithm.response import ResponseParser
from coca_mindspeed.config.schema import RunConfig
from coca_mindspeed.data.records import Record
from coca_mindspeed.errors import ConfigError, TrainingError
from coca_mindspeed.files import read_json_lines, write_json_lines
from coca_mindspeed.grading.verdict import Grader
from coca_mindspeed.local.checkpoint import export_model
from coca_mindspeed.local.experience import JudgedSamples, respond_and_grade
from coca_mindspeed.local.imitation import Imitation
from coca_mindspeed.local.interrupt import saying_what_is_saved
from coca_mindspeed.local.policy import Policy, load_policy
from coca_mindspeed.local.progress import StepProgress
from coca_mindspeed.local.schedule import derived_seed, generator, records_of_step

CONFIDENCE_START = "confidence_start"  # within a run's directory; its model is in MODEL
MODEL, CHECKPOINTS, RESPONSES = "model", "checkpoints", "responses"  # within that
_STAGE = "start of the confidences"


@dataclass(frozen=True)
class Answered:
    """A question that the model has answered several times.

    Attributes:
        record: the question.
        success_rate: share of right answers among all responses, invalid ones too (GESR).
        responses: the valid ones that ended by themselves, with the success rate as their confidence.
    """

    record: Record
    success_rate: float
    responses: Sequence[str]


def check_enough_questions(config: RunConfig, train: Sequence[Record]) -> None:
    """Refuse to ask more questions than there are.

    Raises:
        ConfigError: names the key.
    """
    asked = config.confidence_start.questions
    if asked > len(train):
        raise ConfigError(
            f"confidence_start.questions={asked}: each is asked once, and data.train has {len(train)}; the nearest "
            f"value that works is {len(train)}"
        )


def start_confidences(
    policy: Policy,
    train: Sequence[Record],
    grader: Grader,
    config: RunConfig,
    output: Path,
    *,
    show_progress: bool,
) -> Policy:
    """The policy after the start, which is also exported to ``output/confidence_start/model``.

    Where adapters are trained, they are merged in the export, as after :func:`.format_warm_up.teach_format`.

    Args:
        policy: a model that writes the format; it is trained in place.
        train: ``confidence_start.questions`` of them are asked, ``rollout.group_size`` times each.
        grader: says who is right.
        config: the run's.
        output: the run's directory; it may hold this start, finished or stopped.
        show_progress: draw progress bars.

    Raises:
        TrainingError: no response of the model states a confidence.
        InterruptedRunError: Ctrl-C or SIGTERM; what was sampled and learned is saved.
    """
    place = output / CONFIDENCE_START
    if not (place / MODEL).exists():
        answered = _ask(policy, train, grader, config, place / RESPONSES, show_progress)
        _tell(answered, config, show_progress)
        settings = config.confidence_start
        Imitation(
            _Lessons([each for each in answered if each.responses], settings.batch),
            config.method.training_method.system_prompt,
            settings.steps,
            settings.lr,
            optimizer_name=config.optimizer.name,
            microbatching=config.trainer,
        ).run_resumably(
            policy,
            np.random.default_rng(derived_seed(config.seed, _STAGE, "lessons")),
            place / CHECKPOINTS,
            config.model,
            config.checkpoint.interval,
            stage=_STAGE,
            show_progress=show_progress,
        )
        export_model(policy, place / MODEL)
    elif policy.adapters is None:
        policy = load_policy(place / MODEL, config.model, policy.device, where="start of the confidences")
    shutil.rmtree(place / CHECKPOINTS, ignore_errors=True)
    if policy.adapters is None:
        return policy
    return load_policy(place / MODEL, config.model, policy.device, where="start of the confidences")


@dataclass(frozen=True)
class _Lessons:
    """Questions drawn at random, with one of the responses to each."""

    answered: Sequence[Answered]
    batch: int

    def __call__(self, random: np.random.Generator) -> tuple[list[Record], list[str]]:
        chosen = [self.answered[i] for i in random.integers(len(self.answered), size=self.batch)]
        return [c.record for c in chosen], [c.responses[int(random.integers(len(c.responses)))] for c in chosen]


def _ask(
    policy: Policy, train: Sequence[Record], grader: Grader, config: RunConfig, place: Path, show_progress: bool
) -> list[Answered]:
    """Ask the questions, as many at once as a step does; each such part is a file, which is not asked again."""
    questions = records_of_step(train, 0, config.confidence_start.questions, derived_seed(config.seed, _STAGE))
    at_once = config.rollout.prompts
    answered: list[Answered] = []
    with (
        saying_what_is_saved("stopped while the start of the confidences asked", f"--resume goes on from {place}"),
        StepProgress(len(questions), show_progress, title="asking  ") as progress,
    ):
        for number, first in enumerate(range(0, len(questions), at_once)):
            asked, path = questions[first : first + at_once], place / f"part_{number:04d}.jsonl"
            if not path.exists():
                draw = generator(policy.device, config.seed, _STAGE, number)
                size = config.rollout.group_size
                graded = respond_and_grade(policy, asked, grader, config.method, config.rollout, draw, size)
                place.mkdir(parents=True, exist_ok=True)
                write_json_lines(path, map(_row, _answered(graded, config.method.parser())))
            rows = (row for _, row in read_json_lines(path))
            answered += [
                Answered(record, row["success_rate"], row["responses"]) for record, row in zip(asked, rows, strict=True)
            ]
            progress.show(len(answered))
    return answered


def _row(answered: Answered) -> dict[str, object]:
    return {
        "id": answered.record.id,
        "success_rate": answered.success_rate,
        "responses": answered.responses,
    }


def _answered(graded: JudgedSamples, parser: ResponseParser) -> list[Answered]:
    rates = graded.correct.double().mean(dim=1).tolist()
    whole = graded.samples.finished.tolist()
    found = []
    for i, (record, rate) in enumerate(zip(graded.records, rates, strict=True)):
        rows = range(i * graded.group_size, (i + 1) * graded.group_size)
        restated = [parser.restated(graded.judged.texts[row], rate) for row in rows if whole[row]]
        # A byte that is no text was replaced in decoding: that is not what the model has written.
        found.append(Answered(record, rate, [text for text in restated if text is not None and "\ufffd" not in text]))
    return found


def _tell(answered: Sequence[Answered], config: RunConfig, show: bool) -> None:
    """Say what there is to be learned.

    Raises:
        TrainingError: nothing.
    """
    asked = f"{len(answered)} questions, asked {config.rollout.group_size} times each"
    empty = sum(not each.responses for each in answered)
    if empty == len(answered):
        raise TrainingError(
            f"confidence_start.questions={len(answered)}: of {asked}, no response states a confidence and ends; the "
            "start needs a model that writes the format (warm_up.records teaches it)"
        )
    rates = [each.success_rate for each in answered if each.responses]
    spread = statistics.pstdev(rates)
    if show:
        left_out = f"; {empty} without a valid response are left out" if empty else ""
        print(
            f"{asked}: success rate {statistics.fmean(rates):.2f} on average, deviation {spread:.2f}{left_out}",
            file=sys.stderr,
            flush=True,
        )
    if spread == 0:
        print(
            f"warning: all of them have a success rate of {rates[0]:g}, so that nothing but this number can be learned "
            "in the start of the confidences",
            file=sys.stderr,
            flush=True,
        )
