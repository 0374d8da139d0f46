"""The update of a policy on one step's experience."""

import functools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from coca_mindspeed.algorithm.advantages import SegmentMasks
from coca_mindspeed.algorithm.objective import Objective, segment_objective
from coca_mindspeed.config.schema import RunConfig
from coca_mindspeed.local.experience import Experience
from coca_mindspeed.local.log_probs import ResponseBatch
from coca_mindspeed.local.microbatches import Microbatch, microbatches
from coca_mindspeed.local.policy import Policy
from coca_mindspeed.local.prefix_sharing import PassCost, ResponsePasses
from coca_mindspeed.local.sampler import Samples


class _Part(NamedTuple):
    """What a microbatch contributes: its objective, and the sum of each segment's entropies."""

    objective: Objective
    entropy: tuple[Tensor, Tensor]


class NotFiniteError(ArithmeticError):
    """A loss or a gradient is NaN or infinite; the weights were not updated with it."""


def update_policy(
    policy: Policy, experience: Experience, optimizer: torch.optim.Optimizer, lr: float, config: RunConfig
) -> dict[str, float]:
    """Run ``trainer.epochs`` passes over the step's prompts in ``trainer.minibatches`` updates, groups whole.

    Returns:
        Means over the updates of loss and gradient norm, and over tokens of each segment's statistics and entropy (of
        the policy that is being updated, in nats).

    Raises:
        NotFiniteError: before any weight is touched by what is not finite.
    """
    if policy.sharing == "none":  # microbatches are filled as if every response had a prompt of its own
        config = config.model_copy(update={"trainer": config.trainer.model_copy(update={"share_prompts": False})})
    for group in optimizer.param_groups:
        group["lr"] = lr
    losses, norms = [], []
    every_part: list[_Part] = []
    for _ in range(config.trainer.epochs):
        for minibatch in minibatches_of(len(experience.graded.records), config):
            parts = _accumulate_gradient(policy, experience, minibatch, config)
            loss = sum(float(part.objective.loss) for part in parts)
            norm = float(torch.nn.utils.clip_grad_norm_(policy.trained_parameters(), config.optimizer.grad_clip))
            for name, value in (("objective/loss", loss), ("objective/grad_norm", norm)):
                if not math.isfinite(value):
                    raise NotFiniteError(f"{name} is {value}; the weights were not updated with it")
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            losses.append(loss)
            norms.append(norm)
            every_part += parts
    metrics = {"objective/loss": sum(losses) / len(losses), "objective/grad_norm": sum(norms) / len(norms)}
    for index, name in enumerate(("confidence", "answer")):
        total, *others = (getattr(part.objective, name) for part in every_part)
        for more in others:
            total = total + more
        metrics |= {f"{name}/{key}": value for key, value in total.means().items()}
        entropy = sum(float(part.entropy[index]) for part in every_part)
        metrics[f"{name}/entropy"] = entropy / max(1.0, float(total.tokens))
    return metrics


def _accumulate_gradient(
    policy: Policy, experience: Experience, minibatch: Sequence[int], config: RunConfig
) -> list[_Part]:
    """Backward passes over one minibatch's microbatches; their losses and gradients add up to the minibatch's."""
    samples, group = experience.graded.samples, config.rollout.group_size
    lengths = samples.lengths.tolist()
    tokens = sum(lengths[row] for prompt in minibatch for row in range(prompt * group, (prompt + 1) * group))
    parts = []
    for microbatch in microbatches_of(samples, minibatch, config):
        rows, responses = responses_of(policy, samples, microbatch, config)
        width = responses.token_ids.shape[1]
        masks = SegmentMasks(*(mask[rows, :width] for mask in experience.masks))
        objective_of = functools.partial(
            segment_objective,
            old_log_probs=samples.log_probs[rows, :width],
            advantages=experience.advantages[rows, :width],
            masks=masks,
            clip=config.method.clip,
            aggregation=config.method.loss_aggregation,
            responses=len(minibatch) * group,
            tokens=tokens,
        )
        objective, scores = responses.backward(objective_of)
        confidence, answer = (scores.entropy.masked_fill(~mask, 0.0).sum() for mask in masks)
        parts.append(_Part(objective, (confidence, answer)))
    return parts


def minibatches_of(prompts: int, config: RunConfig) -> list[list[int]]:
    """The prompts of each of a step's updates."""
    return [part.tolist() for part in torch.arange(prompts).chunk(config.trainer.minibatches)]


def microbatches_of(samples: Samples, minibatch: Sequence[int], config: RunConfig) -> list[Microbatch]:
    """Which of a minibatch's responses share a pass."""
    lengths, prompt_lengths = samples.lengths.tolist(), list(map(len, samples.prompts))
    return microbatches(minibatch, config.rollout.group_size, lengths, prompt_lengths, config.trainer)


def responses_of(
    policy: Policy, samples: Samples, microbatch: Microbatch, config: RunConfig
) -> tuple[Tensor, ResponseBatch]:
    """A microbatch's rows, int64 ``[rows]``, and their responses, up to the end of the longest."""
    rows = torch.tensor(microbatch.rows, device=policy.device)
    lengths = samples.lengths[rows]
    token_ids = samples.token_ids[rows, : int(lengths.max())]
    prompts = [samples.prompts[prompt] for prompt in microbatch.prompts]
    responses = ResponseBatch(
        policy,
        prompts,
        token_ids,
        temperature=config.rollout.temperature,
        share_prompts=config.trainer.share_prompts,
        group_sizes=microbatch.group_sizes,
    )
    if not config.trainer.share_prompts:
        return rows, responses
    prompt_of = np.repeat(np.arange(len(prompts)), microbatch.group_sizes)
    cost, longest = pass_cost(policy.device, config), max(map(len, prompts))
    passes = ResponsePasses.cheapest(token_ids.cpu().numpy(), lengths.cpu().numpy(), prompt_of, longest, cost)
    return rows, replace(responses, passes=passes)


def pass_cost(device: torch.device, config: RunConfig) -> PassCost:
    """What a pass costs that goes on from others.

    Measured with a small model on a CPU; a guess elsewhere, where a pass of few tokens takes as long as one of
    thousands.  A token's keys and values are less than a quarter of what a layer keeps of it for the backward pass (a
    fifth where heads are as wide as Qwen3-0.6B's and a GPU repeats them), and less than three times what is left of
    that where layers run once more (2.7 times for Gemma 7B's): passes that cost less need no more memory than one of
    all.
    """
    each = 128 if device.type == "cpu" else 4096
    return PassCost(each=each, token_before=3 if config.model.gradient_checkpointing else 1 / 4)
