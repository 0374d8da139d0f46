"""Responses of a policy: one step's rollout, and the predictions of an evaluation."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from coca_mindspeed.algorithm.methods import MethodSettings
from coca_mindspeed.algorithm.parsing import SEGMENTS
from coca_mindspeed.config.schema import RolloutConfig, RunConfig
from coca_mindspeed.data.records import Record
from coca_mindspeed.evaluation.predictions import Prediction
from coca_mindspeed.grading.verdict import Grader
from coca_mindspeed.local.policy import Policy
from coca_mindspeed.local.sampler import Rollout, sample_responses
from coca_mindspeed.scoring.metrics import rollout_metrics, values
from coca_mindspeed.scoring.responses import ResponseScorer, predictions
from coca_mindspeed.scoring.rollout import Credited, Stated


def respond(
    policy: Policy,
    records: Sequence[Record],
    system_prompt: str | None,
    sampling: RolloutConfig,
    generator: torch.Generator,
    group_size: int,
    progress: Callable[[int], None] = lambda tokens: None,
) -> Rollout:
    """Sample ``group_size`` responses to each record; NoDistributionError if probabilities are not finite.

    ``system_prompt`` as of :func:`.prompt_messages`, ``progress`` as of :func:`.sample_responses`.
    """
    return sample_responses(
        policy,
        policy.encode_prompts(records, system_prompt),
        group_size=group_size,
        max_new_tokens=sampling.max_new_tokens,
        temperature=sampling.temperature,
        generator=generator,
        batch_responses=sampling.batch_responses,
        progress=progress,
    )


def step_metrics(rollout: Rollout, credited: Credited) -> dict[str, float]:
    """Metrics of a step's responses, by the names of metrics.jsonl; NaN where undefined."""
    return {
        **values(rollout_metrics(credited)),
        "rollout/entropy": float(rollout.entropy.mean()),
        "response/cut_off_share": float((~rollout.finished).float().mean()),
    }


def predict(
    policy: Policy,
    records: Sequence[Record],
    grader: Grader,
    method: MethodSettings,
    sampling: RolloutConfig,
    generator: torch.Generator,
    progress: Callable[[int], None] = lambda done: None,
    *,
    samples: int = 1,
    probabilities: bool = False,
) -> list[Prediction]:
    """Answer every record ``samples`` times at temperature 1 and grade the answers (paper, evaluation protocol).

    With ``probabilities``, the predictions have ``answer_probability`` and ``tokens``.

    The temperature of ``sampling`` is not used.  ``progress`` is called with the number of records done.
    """
    sampling = sampling.model_copy(update={"temperature": 1.0})
    at_once = max(1, (sampling.batch_responses or _DEFAULT_BATCH_RESPONSES) // samples)
    score = ResponseScorer(method, policy.text, grader)
    answers: list[Prediction] = []
    for start in range(0, len(records), at_once):
        chunk = records[start : start + at_once]
        rollout = respond(policy, chunk, method.system_prompt, sampling, generator, samples)
        graded = score(rollout, chunk)
        rows = [replace(p, sample=row % samples) for row, p in enumerate(predictions(graded))]
        if probabilities:
            of_answer = answer_probabilities(rollout, graded, SEGMENTS[method.training_method.confidence_position])
            beside = zip(rows, of_answer, rollout.lengths.tolist(), strict=True)
            rows = [replace(p, answer_probability=value, tokens=tokens) for p, value, tokens in beside]
        answers += rows
        progress(start + len(chunk))
    return answers


def answer_probabilities(rollout: Rollout, stated: Stated, segments: Sequence[str]) -> list[float | None]:
    """Return the geometric mean of the probabilities of each answer's tokens, end of sequence included.

    ``segments`` names those of ``stated.segment_ends``; a response without a valid confidence is all answer.  None for
    an answer without tokens.
    """
    place, ends = segments.index("answer"), stated.segment_ends
    first = torch.zeros_like(ends[:, 0]) if place == 0 else ends[:, place - 1].where(~stated.stated.isnan(), 0)
    last = ends[:, place].where(~stated.stated.isnan(), rollout.lengths)
    position = torch.arange(rollout.log_probs.shape[1])
    is_answer = (position >= first[:, None]) & (position < last[:, None])
    means = rollout.log_probs.double().where(is_answer, 0).sum(dim=1) / is_answer.sum(dim=1)
    return [None if math.isnan(mean) else math.exp(mean) for mean in means.tolist()]


_DEFAULT_BATCH_RESPONSES = 512  # responses per batch of an evaluation if rollout.batch_responses is null


def largest_evaluation_batch(config: RunConfig) -> int:
    """Responses in the largest batch of a run's evaluations; 0: it has none."""
    evaluation, data = config.evaluation, config.data
    questions = [evaluation.questions] if evaluation.interval else []
    if evaluation.final_questions != 0 and (data.name == "arithmetic" or data.evaluate is not None):
        questions.append(evaluation.final_questions)
    most, samples = config.rollout.batch_responses or _DEFAULT_BATCH_RESPONSES, evaluation.samples
    sizes = [most if count is None else min(most, count * samples) for count in questions]
    return max((max(samples, size) for size in sizes), default=0)
