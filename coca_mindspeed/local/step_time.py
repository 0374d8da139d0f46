"""Estimated time of a local run: three short passes are measured, the rest is arithmetic."""

import time
from typing import NamedTuple

import torch

from coca_mindspeed.config.schema import RunConfig
from coca_mindspeed.local.memory import LargestMicrobatch, prompts_at_once, responses_of, update_pass
from coca_mindspeed.local.policy import Policy
from coca_mindspeed.local.sampler import Decoder, draw

_TOKENS = 128  # of a prompt, and of a response, that are run; longer ones are taken to cost in proportion


class PassSeconds(NamedTuple):
    """Measured seconds.

    Attributes:
        prompt_token: a token of a prompt before sampling.
        sampled_token: the next token of all responses of a batch, with half of the longest ones in the KV cache.
        update_token: a token, forwards and backwards.
    """

    prompt_token: float
    sampled_token: float
    update_token: float


class StepSeconds(NamedTuple):
    rollout: float
    update: float


def measure_passes(policy: Policy, config: RunConfig) -> PassSeconds:
    """Time the three passes on token ids without meaning; the policy's weights stay as they are."""
    rollout = config.rollout
    prompt, response = min(_TOKENS, rollout.max_prompt_tokens), min(_TOKENS, rollout.max_new_tokens)
    generator = torch.Generator(policy.device).manual_seed(0)
    with torch.inference_mode(), policy.autocast():
        for _ in range(2):  # the first one warms up
            started = time.perf_counter()
            decoder = Decoder(policy, [[0] * prompt], rollout.max_prompt_tokens + rollout.max_new_tokens)
            float(decoder.logits[0, 0])  # waits for the device
            prompt_seconds = time.perf_counter() - started
        decoder.keep(torch.zeros(prompts_at_once(config) * rollout.group_size, dtype=torch.long, device=policy.device))
        token, _ = draw(policy, decoder.logits, rollout.temperature, generator)
        middle = max(prompt + 2, rollout.max_prompt_tokens + rollout.max_new_tokens // 2)
        while decoder.width < middle:
            decoder.skip_to(max(decoder.width, middle - 2 if decoder.width < middle - 2 else middle - 1))
            started = time.perf_counter()
            decoder.step(token)
            draw(policy, decoder.logits.nan_to_num(), rollout.temperature, generator)
            float(decoder.logits[0, 0])
            sampled_seconds = time.perf_counter() - started
    responses = responses_of(policy, LargestMicrobatch(prompt, response, [1]), config)
    started = time.perf_counter()
    update_pass(responses)
    float(sum(p.grad.flatten()[0] for p in policy.trained_parameters() if p.grad is not None))
    update_seconds = time.perf_counter() - started
    policy.model.zero_grad(set_to_none=True)
    return PassSeconds(prompt_seconds / prompt, sampled_seconds, update_seconds / (prompt + response))


def step_seconds(config: RunConfig, passes: PassSeconds, prompt: int, response: int) -> StepSeconds:
    """Seconds of a training step whose prompts and responses have these lengths in tokens."""
    rollout, trainer = config.rollout, config.trainer
    responses = rollout.prompts * rollout.group_size
    batches = -(-rollout.prompts // prompts_at_once(config))
    tokens = responses * response + (rollout.prompts if trainer.share_prompts else responses) * prompt
    return StepSeconds(
        rollout=rollout.prompts * prompt * passes.prompt_token + batches * response * passes.sampled_token,
        update=trainer.epochs * tokens * passes.update_token,
    )
