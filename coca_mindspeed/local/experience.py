"""One step's experience: sample, grade, compute advantages; and evaluation with one sample per question."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from coca_mindspeed.algorithm.advantages import SegmentMasks
from coca_mindspeed.config.schema import MethodConfig, RolloutConfig, RunConfig
from coca_mindspeed.data.records import Record
from coca_mindspeed.evaluation.predictions import Prediction
from coca_mindspeed.grading.verdict import Grader
from coca_mindspeed.local.policy import Policy
from coca_mindspeed.local.readings import Numbers, read_confidences
from coca_mindspeed.local.sampler import Samples, sample_responses
from coca_mindspeed.scoring.batch import ScoredBatch
from coca_mindspeed.scoring.responses import ScoredResponses, credit_rule, predictions, response_scorer


@dataclass(frozen=True)
class GradedSamples:
    """Graded responses.  ``B = P * G`` rows, group by group, as in :class:`Samples`.

    Attributes:
        records: P records.
        samples: their responses.
        responses: B scored responses.
        group_size: G.
        seconds: wall time of ``rollout`` and ``grading``.
    """

    records: Sequence[Record]
    samples: Samples
    responses: ScoredResponses
    group_size: int
    seconds: dict[str, float]

    @property
    def correct(self) -> Tensor:
        """Right answers, bool ``[P, G]``."""
        return self.responses.correct.view(-1, self.group_size)

    @property
    def confidence(self) -> Tensor:
        """Stated confidences, float64 ``[P, G]``, NaN where the response is invalid."""
        return self.responses.confidence.view(-1, self.group_size)


def respond_and_grade(
    policy: Policy,
    records: Sequence[Record],
    grader: Grader,
    method: MethodConfig,
    rollout: RolloutConfig,
    generator: torch.Generator,
    group_size: int,
) -> GradedSamples:
    """Sample ``group_size`` responses to each record, parse their confidences and grade their answers.

    Raises:
        NoDistributionError: the policy's probabilities are not finite.
    """
    start = time.perf_counter()
    prompts = policy.encode_prompts(records, method.training_method.system_prompt)
    samples = sample_responses(
        policy,
        prompts,
        group_size=group_size,
        max_new_tokens=rollout.max_new_tokens,
        temperature=rollout.temperature,
        generator=generator,
        batch_responses=rollout.batch_responses,
    )
    token_ids, lengths = samples.token_ids.cpu(), samples.lengths.cpu()
    sampled = time.perf_counter()
    score = response_scorer(method, policy.text, grader)
    responses = score(token_ids, lengths, [record for record in records for _ in range(group_size)])
    return GradedSamples(
        records=records,
        samples=samples,
        responses=responses,
        group_size=group_size,
        seconds={"rollout": sampled - start, "grading": responses.grading_seconds},
    )


@dataclass(frozen=True)
class Experience:
    """Scored samples with the advantage of each token, ready for the update.

    Attributes:
        graded: the sampled and graded responses.
        scored: rewards and advantages, on the CPU.
        advantages: float32 ``[B, tokens]`` on the policy's device; the ``masks`` are bool of the same shape.
    """

    graded: GradedSamples
    scored: ScoredBatch
    advantages: Tensor
    masks: SegmentMasks


def reward_and_advantage(graded: GradedSamples, config: MethodConfig, stage: int, device: torch.device) -> Experience:
    """Compute rewards of the method's stage, group advantages of each segment, and their tokens."""
    responses = graded.responses
    scored = ScoredBatch.of(
        credit_rule(config, stage),
        group_size=graded.group_size,
        correct=responses.correct,
        gradable=responses.gradable,
        confidence=responses.confidence,
        confidence_lengths=responses.confidence_lengths,
        response_lengths=graded.samples.lengths.cpu(),
        width=graded.samples.token_ids.shape[1],
        log_probs=graded.samples.log_probs.cpu() if config.entropy_bonus else None,
        texts=responses.texts,
        verdicts=responses.verdicts,
    )
    masks = SegmentMasks(*(mask.to(device) for mask in scored.masks))
    return Experience(graded, scored, scored.columns()["advantages"].to(device), masks)


def experience_metrics(experience: Experience) -> dict[str, float]:
    """Metrics of a step's responses, by the names of metrics.jsonl; NaN where undefined."""
    samples = experience.graded.samples
    return {
        **experience.scored.metrics(),
        "rollout/entropy": float(samples.entropy.mean()),
        "response/cut_off_share": float((~samples.finished).float().mean()),
    }


def sample_rows(experience: Experience, prompts: int) -> list[Mapping[str, Any]]:
    """JSON rows of all responses to the first ``prompts`` prompts."""
    records, group = experience.graded.records, experience.graded.group_size
    asked = [record for record in records[:prompts] for _ in range(group)]
    return [
        {"id": record.id, "question": record.question, "gold": record.answer, **row}
        for record, row in zip(asked, experience.scored.rows(range(len(asked))), strict=True)
    ]


def predict(
    policy: Policy,
    records: Sequence[Record],
    grader: Grader,
    method: MethodConfig,
    rollout: RolloutConfig,
    generator: torch.Generator,
    progress: Callable[[int], None] = lambda done: None,
    *,
    samples: int = 1,
    readings: bool = False,
) -> list[Prediction]:
    """Answer every record ``samples`` times at temperature 1 and grade the answers (paper, evaluation protocol).

    The temperature of ``rollout`` is not used.  ``progress`` is called with the number of records done.  ``readings``
    adds the greedy and the expected confidence of each question, if the method states its confidence first.
    """
    rollout = rollout.model_copy(update={"temperature": 1.0})
    rows = evaluation_batch(rollout)
    at_once = max(1, rows // samples)
    found: list[Prediction] = []
    for start in range(0, len(records), at_once):
        chunk = records[start : start + at_once]
        responses = respond_and_grade(policy, chunk, grader, method, rollout, generator, samples).responses
        asked = [record for record in chunk for _ in range(samples)]
        found += [replace(p, sample=row % samples) for row, p in enumerate(predictions(asked, responses))]
        progress(start + len(chunk))
    if not readings or method.training_method.confidence_position != "first":
        return found
    numbers = Numbers.of(policy, (p.response for p in found), method.confidence_decimals)
    if numbers is None:
        return found
    prompts = policy.encode_prompts(records, method.training_method.system_prompt)
    read = read_confidences(policy, prompts, numbers, rows)
    return [
        replace(p, greedy_confidence=greedy, expected_confidence=expectation, confidence_mass=min(1.0, mass))
        for p, (greedy, expectation, mass) in zip(found, (r for r in read for _ in range(samples)), strict=True)
    ]


def evaluation_batch(rollout: RolloutConfig, questions: int | None = None) -> int:
    """Held-out questions per batch, of ``questions`` in all (None: unlimited)."""
    at_once = rollout.batch_responses or _AT_ONCE
    return at_once if questions is None else min(at_once, questions)


def largest_evaluation_batch(config: RunConfig) -> int:
    """Size of the largest batch of a run's evaluations; 0: it has none."""
    evaluation, data = config.evaluation, config.data
    questions = [evaluation.questions] if evaluation.interval else []
    if evaluation.final_questions != 0 and (data.name == "arithmetic" or data.evaluate is not None):
        questions.append(evaluation.final_questions)
    samples = evaluation.samples
    counts = [None if count is None else count * samples for count in questions]
    return max((max(samples, evaluation_batch(config.rollout, count)) for count in counts), default=0)


_AT_ONCE = 512  # responses per batch if rollout.batch_responses is null
