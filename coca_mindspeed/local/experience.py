"""One step's experience: sample, grade, reward, advantage.  Tensors are moved here; the mathematics is elsewhere."""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from coca_mindspeed.algorithm.advantages import (
    SegmentMasks,
    group_advantages,
    group_varies,
    segment_masks,
    token_advantages,
)
from coca_mindspeed.algorithm.boundary import confidence_segment_lengths
from coca_mindspeed.algorithm.response import ParsedResponse, ResponseParser
from coca_mindspeed.algorithm.rewards import SegmentRewards, TrainingMethod, brier_reward, group_success_rate
from coca_mindspeed.config.schema import MethodConfig, RolloutConfig
from coca_mindspeed.data.records import Record
from coca_mindspeed.evaluation.metrics import calibration_metrics
from coca_mindspeed.grading.verdict import Grader, Outcome, Verdict
from coca_mindspeed.local.policy import Policy
from coca_mindspeed.local.sampler import Samples, sample_responses


@dataclass(frozen=True)
class GradedResponses:
    """Responses, taken apart and graded.  ``B = P * G`` rows, group by group, as in :class:`Samples`.

    Attributes:
        records: P records.
        samples: what was sampled.
        texts: B response texts.
        parsed: B parsed responses.
        verdicts: B verdicts on their answers.
        correct: bool ``[P, G]`` on the CPU.
        confidence: float64 ``[P, G]`` on the CPU, NaN where the response is invalid.
        tokens_to_confidence: int64 ``[B]`` on the CPU, tokens up to the end of the closing tag (of an invalid
            response: the tokens that stand in for its confidence).
        seconds: wall time of ``rollout`` and ``grading``.
    """

    records: Sequence[Record]
    samples: Samples
    texts: list[str]
    parsed: list[ParsedResponse]
    verdicts: list[Verdict]
    correct: Tensor
    confidence: Tensor
    tokens_to_confidence: Tensor
    seconds: dict[str, float]


def respond_and_grade(
    policy: Policy,
    records: Sequence[Record],
    grader: Grader,
    method: TrainingMethod,
    method_config: MethodConfig,
    rollout: RolloutConfig,
    generator: torch.Generator,
    group_size: int,
) -> GradedResponses:
    """Sample ``group_size`` responses to each record, parse their confidences and grade their answers."""
    start = time.perf_counter()
    prompts = policy.encode_prompts(records, method.system_prompt, rollout.max_prompt_tokens)
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
    texts = policy.text.decode(token_ids, lengths)
    sampled = time.perf_counter()

    parser = ResponseParser(method.confidence_position, method_config.confidence_decimals)
    parsed = [parser(text) for text in texts]
    repeated = [record for record in records for _ in range(group_size)]
    verdicts = grader.grade(repeated, [p.answer for p in parsed])
    graded = time.perf_counter()

    confidence = torch.tensor([math.nan if p.confidence is None else p.confidence for p in parsed], dtype=torch.float64)
    tokens_to_confidence = confidence_segment_lengths(
        token_ids,
        lengths,
        policy.text,
        ~confidence.isnan(),
        max_confidence_tokens=method_config.max_confidence_tokens,
        position=method.confidence_position,
    )
    return GradedResponses(
        records=records,
        samples=samples,
        texts=texts,
        parsed=parsed,
        verdicts=verdicts,
        correct=torch.tensor([v.correct for v in verdicts]).view(-1, group_size),
        confidence=confidence.view(-1, group_size),
        tokens_to_confidence=tokens_to_confidence,
        seconds={"rollout": sampled - start, "grading": graded - sampled},
    )


@dataclass(frozen=True)
class Experience:
    """Graded responses with the advantage of each of their tokens, ready for the update.

    Attributes:
        graded: the responses.
        advantages: float32 ``[B, tokens]`` on the policy's device.
        masks: bool ``[B, tokens]`` each, likewise.
        confidence_advantage: float32 ``[P, G]`` on the CPU, for the samples' dump.
        answer_advantage: likewise.
        gesr: float64 ``[P, 1]`` on the CPU.
        confidence_reward: float64 ``[P, G]``, the Brier score against GESR, whatever the method rewards.
        varied: bool ``[P]`` each: whether the rewards within a group differ at all.
    """

    graded: GradedResponses
    advantages: Tensor
    masks: SegmentMasks
    confidence_advantage: Tensor
    answer_advantage: Tensor
    gesr: Tensor
    confidence_reward: Tensor
    varied: SegmentRewards


def reward_and_advantage(
    graded: GradedResponses, method: TrainingMethod, config: MethodConfig, stage: int, device: torch.device
) -> Experience:
    """Rewards of the method's stage, group advantages of each segment, and their place on the tokens."""
    rewards = method.rewards(graded.correct, graded.confidence, stage=stage, invalid_reward=config.invalid_reward)
    confidence, answer = (
        group_advantages(reward, ddof=config.advantage_ddof, eps=config.advantage_eps) for reward in rewards
    )
    lengths = graded.samples.lengths.cpu()
    # Answer-first methods have one reward, so their whole response is the answer segment.
    segment = graded.tokens_to_confidence
    if method.confidence_position == "last":
        segment = torch.zeros_like(segment)
    width = graded.samples.token_ids.shape[1]
    masks = segment_masks(segment, lengths, width)
    advantages = token_advantages(confidence.flatten(), answer.flatten(), segment, lengths, width)
    gesr = group_success_rate(graded.correct)
    return Experience(
        graded=graded,
        advantages=advantages.to(device),
        masks=SegmentMasks(*(mask.to(device) for mask in masks)),
        confidence_advantage=confidence,
        answer_advantage=answer,
        gesr=gesr,
        confidence_reward=brier_reward(graded.confidence, gesr, config.invalid_reward),
        varied=SegmentRewards(*map(group_varies, rewards)),
    )


def experience_metrics(experience: Experience) -> dict[str, float]:
    """What a step's responses say, by the names that metrics.jsonl and TensorBoard use; NaN where undefined."""
    graded = experience.graded
    calibration = calibration_metrics(graded.confidence.flatten().numpy(), graded.correct.flatten().numpy())
    lengths = graded.samples.lengths.cpu().float()
    confidence_length = experience.masks.confidence.sum(dim=1).float().cpu()
    ungradable = sum(v.outcome is Outcome.UNGRADABLE for v in graded.verdicts)
    return {
        "reward/answer": float(graded.correct.float().mean()),
        "reward/confidence": float(experience.confidence_reward.mean()),
        "rollout/confidence": float(graded.confidence.nanmean()),
        "rollout/gesr": float(experience.gesr.mean()),
        "rollout/invalid_share": float(graded.confidence.isnan().float().mean()),
        "rollout/accuracy": calibration.accuracy,
        "rollout/ece": calibration.ece,
        "rollout/auroc": calibration.auroc,
        "rollout/brier": calibration.brier,
        "rollout/entropy": float(graded.samples.entropy.mean()),
        "response/length": float(lengths.mean()),
        "response/confidence_length": float(confidence_length.mean()),
        "response/answer_length": float((lengths - confidence_length).mean()),
        "response/cut_off_share": float((~graded.samples.finished).float().mean()),
        "group/no_confidence_variance_share": float((~experience.varied.confidence).float().mean()),
        "group/no_answer_variance_share": float((~experience.varied.answer).float().mean()),
        "grading/ungradable_share": ungradable / len(graded.verdicts),
    }


def sample_rows(experience: Experience, prompts: int) -> list[Mapping[str, Any]]:
    """JSON rows of the first prompts' responses: what was asked, said, graded and learned."""
    graded = experience.graded
    group = graded.correct.shape[1]
    return [
        {
            "id": graded.records[row // group].id,
            "question": graded.records[row // group].question,
            "gold": graded.records[row // group].answer,
            "response": graded.texts[row],
            "confidence": graded.parsed[row].confidence,
            "correct": graded.verdicts[row].correct,
            "verdict": graded.verdicts[row].outcome.value,
            "reason": graded.verdicts[row].reason,
            "gesr": float(experience.gesr[row // group]),
            "confidence_reward": float(experience.confidence_reward.flatten()[row]),
            "confidence_advantage": float(experience.confidence_advantage.flatten()[row]),
            "answer_advantage": float(experience.answer_advantage.flatten()[row]),
            "tokens": int(graded.samples.lengths[row]),
            "confidence_tokens": int(graded.tokens_to_confidence[row]),
        }
        for row in range(min(prompts, len(graded.records)) * group)
    ]
