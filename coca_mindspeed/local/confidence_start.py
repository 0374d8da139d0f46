"""Confidence start: SFT on the model's own responses, with the expected success rate as the stated confidence.

An optional stage that is not part of the paper's method (docs/training.md).  Training questions are sampled in
groups, a cross-validated ridge regression on the model's hidden states predicts each question's success rate, and
the model is trained on its own responses with that rate in place of the stated confidence.
"""

import functools
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from coca_mindspeed.algorithm.boundary import confidence_segment_lengths
from coca_mindspeed.algorithm.parsing import ResponseParser
from coca_mindspeed.config.schema import LEAST_START_QUESTIONS, RunConfig
from coca_mindspeed.data.records import Record
from coca_mindspeed.errors import ConfigError, TrainingError
from coca_mindspeed.grading.math.restated import EvaluatedOnly
from coca_mindspeed.grading.verdict import Grader
from coca_mindspeed.local.experience import GradedSamples, respond_and_grade
from coca_mindspeed.local.interrupt import interruptible
from coca_mindspeed.local.policy import Policy
from coca_mindspeed.local.prefill import prompt_states
from coca_mindspeed.local.resumable import resumable_map
from coca_mindspeed.local.schedule import derived_seed, generator, records_of_step
from coca_mindspeed.local.sft import SFTExample, SFTStage, sft_microbatch_tokens, train_stage_once
from coca_mindspeed.utils.files import read_json_lines, write_json_lines
from coca_mindspeed.utils.packages import require
from coca_mindspeed.utils.tokenization import tokens_as_written

CONFIDENCE_START = "confidence_start"  # within a run's directory; its model is in MODEL
MODEL, CHECKPOINTS, RESPONSES, RATES = "model", "checkpoints", "responses", "rates.jsonl"  # within that
_STAGE = "start of the confidences"  # part of derived seeds
_LAYER = -1
_FOLDS = 5
_PENALTIES = np.logspace(0, 6, 13)  # of the regression; it chooses


@dataclass(frozen=True)
class SampledQuestion:
    """A question that was sampled several times.

    Attributes:
        record: the question.
        success_rate: share of correct answers among all responses, invalid ones included (GESR).
        ungradable: whether an answer could not be graded; such a question is not used.
        responses: text and last token of each valid, finished response that round-trips through the tokenizer.
        other_tokens: number of valid, finished responses that do not round-trip.
    """

    record: Record
    success_rate: float
    ungradable: bool
    responses: Sequence[tuple[str, int]]
    other_tokens: int = 0

    @property
    def useful(self) -> bool:
        return bool(self.responses) and not self.ungradable


def check_enough_questions(config: RunConfig, train: Sequence[Record]) -> None:
    """Raise ConfigError if more questions are to be sampled than there are training records."""
    asked = config.confidence_start.questions
    if asked:
        require("sklearn", purpose=f"confidence_start.questions={asked}")
    if asked > len(train):
        raise ConfigError(
            f"confidence_start.questions={asked}: each question is sampled once, and there are {len(train)} training "
            f"questions; the nearest value that works is {len(train) if len(train) >= LEAST_START_QUESTIONS else 0}"
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
    """Run the confidence start; the model is also exported to ``output/confidence_start/model``.

    ``policy`` writes the format and is trained in place.  ``confidence_start.questions`` of the records are sampled,
    ``rollout.group_size`` times each.  ``output`` is the run's directory, and may hold this stage, finished or stopped.

    Raises:
        TrainingError: too few questions with a valid, graded response.
        InterruptedRunError: Ctrl-C or SIGTERM; samples and weights are saved.
    """
    place = output / CONFIDENCE_START
    return train_stage_once(
        policy,
        functools.partial(_stage, policy, train, grader, config, place, show_progress),
        np.random.default_rng(derived_seed(config.seed, _STAGE, "examples")),
        config,
        exported=place / MODEL,
        checkpoints=place / CHECKPOINTS,
        name=_STAGE,
        show_progress=show_progress,
    )


def _stage(
    policy: Policy, train: Sequence[Record], grader: Grader, config: RunConfig, place: Path, show_progress: bool
) -> SFTStage:
    """Sample and grade the questions, predict their success rates, and make the examples."""
    answered = _ask(policy, train, grader, config, place / RESPONSES, show_progress)
    useful = _useful(answered)
    rates = _rates(policy, useful, config, place / RATES)
    if show_progress:
        _print_summary(answered, rates, config)
    most, settings = config.rollout.max_new_tokens, config.confidence_start
    teach = functools.partial(_example, policy, config.method.parser(), settings.confidence_weight)
    examples = [
        found
        for each, rate in zip(useful, rates, strict=True)
        if (found := [x for own in each.responses if len((x := teach(each.record, *own, rate)).response) <= most])
    ]
    if not examples:
        raise TrainingError(
            f"rollout.max_new_tokens={most}: no response with its new confidence fits; increase it by a few tokens"
        )
    return SFTStage(
        functools.partial(_draw, examples, settings.batch),
        config.method.training_method.system_prompt,
        settings.steps,
        settings.lr,
        temperature=config.rollout.temperature,
        optimizer_name=config.optimizer.name,
        microbatch_tokens=sft_microbatch_tokens(config),
    )


def _draw(examples: Sequence[Sequence[SFTExample]], batch: int, random: np.random.Generator) -> list[SFTExample]:
    """Draw questions, and one of each question's responses."""
    chosen = [examples[i] for i in random.integers(len(examples), size=batch)]
    return [each[int(random.integers(len(each)))] for each in chosen]


def _ask(
    policy: Policy, train: Sequence[Record], grader: Grader, config: RunConfig, place: Path, show_progress: bool
) -> list[SampledQuestion]:
    """Sample the questions, one file per batch; existing files are not sampled again."""
    questions = records_of_step(train, 0, config.confidence_start.questions, derived_seed(config.seed, _STAGE))

    def ask(number: int, asked: Sequence[Record]) -> list[dict[str, object]]:
        graded = respond_and_grade(
            policy,
            asked,
            EvaluatedOnly(grader) if config.data.require_evaluated else grader,
            config.method,
            config.rollout,
            generator(policy.device, config.seed, _STAGE, number),
            config.rollout.group_size,
        )
        return list(map(_row, _sampled_questions(graded, policy)))

    with interruptible("stopped while sampling for the confidence start", f"--resume continues from {place}"):
        rows = resumable_map(
            place, questions, config.rollout.prompts, ask, title="asking  ", show_progress=show_progress
        )
    return [_from_row(record, row) for record, row in zip(questions, rows, strict=True)]


def _row(answered: SampledQuestion) -> dict[str, object]:
    return {
        "id": answered.record.id,
        "success_rate": answered.success_rate,
        "ungradable": answered.ungradable,
        "responses": [{"text": text, "end": end} for text, end in answered.responses],
        "other_tokens": answered.other_tokens,
    }


def _from_row(record: Record, row: dict[str, Any]) -> SampledQuestion:
    responses = [(each["text"], each["end"]) for each in row["responses"]]
    return SampledQuestion(record, row["success_rate"], row["ungradable"], responses, row.get("other_tokens", 0))


def _sampled_questions(graded: GradedSamples, policy: Policy) -> list[SampledQuestion]:
    scored, samples, size = graded.responses, graded.samples, graded.group_size
    rates, ungradable = graded.correct.double().mean(dim=1).tolist(), (~scored.gradable).view(-1, size).any(dim=1)
    ids = [row[:length] for row, length in zip(samples.token_ids.tolist(), samples.lengths.tolist(), strict=True)]
    # A response that does not round-trip (one with a control token, say) would be taught with other tokens.
    encoded = tokens_as_written(policy.tokenizer, policy.text, scored.texts)
    whole = (samples.finished.cpu() & ~scored.confidence.isnan()).tolist()
    found = []
    for i, record in enumerate(graded.records):
        rows = [row for row in range(i * size, (i + 1) * size) if whole[row]]
        responses = [(scored.texts[row], ids[row][-1]) for row in rows if encoded[row] == ids[row][:-1]]
        found.append(SampledQuestion(record, rates[i], bool(ungradable[i]), responses, len(rows) - len(responses)))
    return found


def _useful(answered: Sequence[SampledQuestion]) -> list[SampledQuestion]:
    useful = [each for each in answered if each.useful]
    if len(useful) < LEAST_START_QUESTIONS:
        silent = sum(not each.responses and not each.other_tokens for each in answered)
        others = sum(not each.responses and each.other_tokens > 0 for each in answered)
        ungradable = sum(each.ungradable for each in answered)
        raise TrainingError(
            f"confidence_start.questions={len(answered)}: only {len(useful)} of them are usable, and "
            f"{LEAST_START_QUESTIONS} are needed: {silent} have no finished response with a valid confidence "
            f"(warm_up.records teaches the format), {others} only responses that do not round-trip through the "
            f"tokenizer, {ungradable} an answer that could not be graded"
        )
    return useful


def _rates(policy: Policy, answered: Sequence[SampledQuestion], config: RunConfig, path: Path) -> list[float]:
    """Expected success rates, written to ``path`` so that a resumed start reads the same numbers."""
    if not path.exists():
        at_once = config.rollout.prompts
        system_prompt = config.method.training_method.system_prompt
        prompts = policy.encode_prompts([each.record for each in answered], system_prompt)
        parts = range(0, len(prompts), at_once)
        states = torch.cat([prompt_states(policy, prompts[i : i + at_once], _LAYER) for i in parts])
        found = expected_rates(
            states.double().numpy(),
            np.array([each.success_rate for each in answered]),
            derived_seed(config.seed, _STAGE, "folds"),
        )
        rows = zip(answered, found.tolist(), strict=True)
        write_json_lines(path, ({"id": a.record.id, "success_rate": a.success_rate, "expected": e} for a, e in rows))
    return [row["expected"] for _, row in read_json_lines(path)]


def expected_rates(states: NDArray[np.float64], rates: NDArray[np.float64], seed: int) -> NDArray[np.float64]:
    """Predict each question's success rate in [0, 1] by ridge regression of ``rates`` ``[n]`` on the other folds.

    ``states`` are hidden states, float ``[n, hidden]``; ``seed`` is that of the split into folds.
    """
    # A second that every command of the engine would take to start.
    from sklearn.linear_model import RidgeCV
    from sklearn.model_selection import KFold, cross_val_predict
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    folds = KFold(_FOLDS, shuffle=True, random_state=seed % 2**32)
    regression = make_pipeline(StandardScaler(), RidgeCV(alphas=_PENALTIES))
    found: NDArray[np.float64] = cross_val_predict(regression, states, rates, cv=folds)
    return found.clip(0.0, 1.0)


def _example(
    policy: Policy, parser: ResponseParser, weight: float, record: Record, text: str, end: int, rate: float
) -> SFTExample:
    """The response ``text`` with the confidence ``rate``, whose tokens have the loss weight ``weight``."""
    restated = parser.restated(text, rate)
    assert restated is not None  # it was valid when it was sampled
    ids = [*tokens_as_written(policy.tokenizer, policy.text, [restated])[0], end]
    size, valid = torch.tensor([len(ids)]), torch.tensor([True])
    stop = int(confidence_segment_lengths(torch.tensor([ids]), size, policy.text, valid, position=parser.position))
    before = 0 if parser.position == "first" else len(parser(restated).answer.encode())
    ends = np.cumsum([len(policy.text.bytes_of(x)) for x in ids[:stop]])
    start = int(np.searchsorted(ends, before, side="right"))  # the first token beyond the answer
    return SFTExample(record, ids, [weight if start <= i < stop else 1.0 for i in range(len(ids))])


def _print_summary(answered: Sequence[SampledQuestion], rates: Sequence[float], config: RunConfig) -> None:
    sampled = [each.success_rate for each in answered if each.useful]
    spread = statistics.pstdev(sampled)
    left_out = len(answered) - len(sampled)
    text = (
        f"{len(answered)} questions, asked {config.rollout.group_size} times each: success rate "
        f"{statistics.fmean(sampled):.2f} on average, deviation {spread:.2f}"
        f"{f'; {left_out} without a valid or with an ungradable response are left out' if left_out else ''}"
    )
    if spread == 0 or statistics.pstdev(rates) == 0:
        text += "\nwarning: the success rates are constant, so the start can only teach a constant confidence"
    else:
        text += f"; cross-validated correlation of predicted and sampled rates: {np.corrcoef(sampled, rates)[0, 1]:.2f}"
    print(text, file=sys.stderr, flush=True)
