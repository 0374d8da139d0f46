"""Evaluation of a policy: one sample at temperature 1 for each record (paper, evaluation protocol)."""

from collections.abc import Callable, Sequence

import torch

from coca_mindspeed.config.schema import MethodConfig, RolloutConfig, RunConfig
from coca_mindspeed.data.records import Record
from coca_mindspeed.evaluation.predictions import Prediction
from coca_mindspeed.grading.verdict import Grader
from coca_mindspeed.local.experience import respond_and_grade
from coca_mindspeed.local.policy import Policy
from coca_mindspeed.scoring.responses import predictions


def predict(
    policy: Policy,
    records: Sequence[Record],
    grader: Grader,
    method: MethodConfig,
    rollout: RolloutConfig,
    generator: torch.Generator,
    progress: Callable[[int], None] = lambda done: None,
) -> list[Prediction]:
    """Answer every record once at temperature 1 and grade the answer.

    Args:
        policy: what answers.
        records: the questions.
        grader: says who is right.
        method: gives the prompt, and the place and width of the confidence.
        rollout: length limits, and how many responses to sample at once; its temperature is not used.
        generator: on the policy's device.
        progress: called with the number of records done so far.
    """
    rollout = rollout.model_copy(update={"temperature": 1.0})
    at_once = questions_at_once(rollout)
    found: list[Prediction] = []
    for start in range(0, len(records), at_once):
        chunk = records[start : start + at_once]
        judged = respond_and_grade(policy, chunk, grader, method, rollout, generator, 1).judged
        found += predictions(chunk, judged)
        progress(len(found))
    return found


def questions_at_once(rollout: RolloutConfig, questions: int | None = None) -> int:
    """Held-out questions that are answered at once, of so many (None: of any number)."""
    at_once = rollout.batch_responses or _AT_ONCE
    return at_once if questions is None else min(at_once, questions)


def held_out_at_once(config: RunConfig) -> int:
    """Of the largest batch of a run's evaluations, those while it trains and the one behind; 0: it has none."""
    evaluation, data = config.evaluation, config.data
    questions = [evaluation.questions] if evaluation.interval else []
    if evaluation.final_questions != 0 and (data.name == "arithmetic" or data.evaluate is not None):
        questions.append(evaluation.final_questions)
    return max((questions_at_once(config.rollout, count) for count in questions), default=0)


_AT_ONCE = 512  # responses sampled at once where the configuration names no number
