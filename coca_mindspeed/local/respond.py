"""Responses of a policy: one step's rollout, and the predictions of an evaluation."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from coca_mindspeed.config.schema import MethodConfig, RolloutConfig, RunConfig
from coca_mindspeed.data.records import Record
from coca_mindspeed.evaluation.predictions import Prediction
from coca_mindspeed.grading.verdict import Grader
from coca_mindspeed.local.policy import Policy
from coca_mindspeed.local.readings import Numbers, read_confidences
from coca_mindspeed.local.sampler import sample_responses
from coca_mindspeed.scoring.metrics import rollout_metrics, values
from coca_mindspeed.scoring.responses import predictions, response_scorer
from coca_mindspeed.scoring.rollout import Rollout


def respond(
    policy: Policy,
    records: Sequence[Record],
    method: MethodConfig,
    sampling: RolloutConfig,
    generator: torch.Generator,
    group_size: int,
) -> Rollout:
    """Sample ``group_size`` responses to each record.

    Raises:
        NoDistributionError: the policy's probabilities are not finite.
    """
    return sample_responses(
        policy,
        policy.encode_prompts(records, method.training_method.system_prompt),
        group_size=group_size,
        max_new_tokens=sampling.max_new_tokens,
        temperature=sampling.temperature,
        generator=generator,
        batch_responses=sampling.batch_responses,
        records=records,
    )


def respond_and_grade(
    policy: Policy,
    records: Sequence[Record],
    grader: Grader,
    method: MethodConfig,
    sampling: RolloutConfig,
    generator: torch.Generator,
    group_size: int,
) -> Rollout:
    """Sample ``group_size`` responses to each record, parse their confidences and grade their answers."""
    rollout = respond(policy, records, method, sampling, generator, group_size)
    return response_scorer(method, policy.text, grader)(rollout)


def step_metrics(rollout: Rollout) -> dict[str, float]:
    """Metrics of a step's responses, by the names of metrics.jsonl; NaN where undefined."""
    assert rollout.entropy is not None
    assert rollout.finished is not None
    return {
        **values(rollout_metrics(rollout)),
        "rollout/entropy": float(rollout.entropy.mean()),
        "response/cut_off_share": float((~rollout.finished).float().mean()),
    }


def sample_rows(rollout: Rollout, prompts: int) -> list[Mapping[str, Any]]:
    """JSON rows of all responses to the first ``prompts`` prompts."""
    asked = rollout.records[: prompts * rollout.credit.group_size]
    return [
        {"id": record.id, "question": record.question, "gold": record.answer, **row}
        for record, row in zip(asked, rollout.rows(range(len(asked))), strict=True)
    ]


def predict(
    policy: Policy,
    records: Sequence[Record],
    grader: Grader,
    method: MethodConfig,
    sampling: RolloutConfig,
    generator: torch.Generator,
    progress: Callable[[int], None] = lambda done: None,
    *,
    samples: int = 1,
    readings: bool = False,
) -> list[Prediction]:
    """Answer every record ``samples`` times at temperature 1 and grade the answers (paper, evaluation protocol).

    The temperature of ``sampling`` is not used.  ``progress`` is called with the number of records done.  ``readings``
    adds the greedy and the expected confidence of each question, if the method states one before the answer.
    """
    sampling = sampling.model_copy(update={"temperature": 1.0})
    rows = sampling.batch_responses or _DEFAULT_BATCH_RESPONSES
    at_once = max(1, rows // samples)
    answers: list[Prediction] = []
    for start in range(0, len(records), at_once):
        chunk = records[start : start + at_once]
        rollout = respond_and_grade(policy, chunk, grader, method, sampling, generator, samples)
        answers += [replace(p, sample=row % samples) for row, p in enumerate(predictions(rollout))]
        progress(start + len(chunk))
    if not readings or method.training_method.confidence_position == "last":
        return answers
    numbers = Numbers.of(policy, (p.response for p in answers), method.confidence_decimals)
    if numbers is None:
        return answers
    prompts = policy.encode_prompts(records, method.training_method.system_prompt)
    read = read_confidences(policy, prompts, numbers, rows)
    return [
        replace(p, greedy_confidence=greedy, expected_confidence=expectation, confidence_mass=min(1.0, mass))
        for p, (greedy, expectation, mass) in zip(answers, (r for r in read for _ in range(samples)), strict=True)
    ]


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
