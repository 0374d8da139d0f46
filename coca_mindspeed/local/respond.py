"""Responses of a policy: one step's rollout, and the predictions of an evaluation."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from coca_mindspeed.algorithm.methods import MethodSettings
from coca_mindspeed.config.schema import RolloutConfig, RunConfig
from coca_mindspeed.data.records import Record
from coca_mindspeed.evaluation.predictions import Prediction
from coca_mindspeed.grading.verdict import Grader
from coca_mindspeed.local.policy import Policy
from coca_mindspeed.local.sampler import Rollout, sample_responses
from coca_mindspeed.scoring.metrics import rollout_metrics, values
from coca_mindspeed.scoring.responses import predictions, response_scorer
from coca_mindspeed.scoring.rollout import Credited


def respond(
    policy: Policy,
    records: Sequence[Record],
    method: MethodSettings,
    sampling: RolloutConfig,
    generator: torch.Generator,
    group_size: int,
    progress: Callable[[int], None] = lambda tokens: None,
) -> Rollout:
    """Sample ``group_size`` responses to each record; NoDistributionError if probabilities are not finite.

    ``progress`` as of :func:`.sample_responses`.
    """
    return sample_responses(
        policy,
        policy.encode_prompts(records, method.training_method.system_prompt),
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
) -> list[Prediction]:
    """Answer every record ``samples`` times at temperature 1 and grade the answers (paper, evaluation protocol).

    The temperature of ``sampling`` is not used.  ``progress`` is called with the number of records done.
    """
    sampling = sampling.model_copy(update={"temperature": 1.0})
    at_once = max(1, (sampling.batch_responses or _DEFAULT_BATCH_RESPONSES) // samples)
    score = response_scorer(method, policy.text, grader)
    answers: list[Prediction] = []
    for start in range(0, len(records), at_once):
        chunk = records[start : start + at_once]
        graded = score(respond(policy, chunk, method, sampling, generator, samples), chunk)
        answers += [replace(p, sample=row % samples) for row, p in enumerate(predictions(graded))]
        progress(start + len(chunk))
    return answers


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
