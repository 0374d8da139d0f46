"""Supervised warm-up of the tiny model: it learns to answer, and to be sure of everything.

The confidence that it is shown does not depend on the question, so nothing about calibration is taught here.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from coca_mindspeed.algorithm.response import CLOSE_TAG, OPEN_TAG, ConfidencePosition
from coca_mindspeed.algorithm.rewards import TrainingMethod
from coca_mindspeed.config.schema import OptimizerConfig, WarmUpConfig
from coca_mindspeed.data.records import Record
from coca_mindspeed.local.log_probs import response_log_probs
from coca_mindspeed.local.policy import Policy
from coca_mindspeed.local.schedule import derived_seed, learning_rate


def warm_up(
    policy: Policy,
    records: Sequence[Record],
    method: TrainingMethod,
    config: WarmUpConfig,
    seed: int,
    progress: Callable[[int, float], None] = lambda step, loss: None,
) -> None:
    """Train ``policy`` in place to imitate over-confident responses.

    Args:
        policy: the tiny model.
        records: questions with their answers.
        method: says where the confidence stands.
        config: see :class:`WarmUpConfig`.
        seed: draws questions, wrong digits and confidences.
        progress: called after each step with the steps done and the loss in nats a token.
    """
    random = np.random.default_rng(derived_seed(seed, "warm-up"))
    parameters = list(policy.model.parameters())
    optimizer = torch.optim.AdamW(parameters, betas=(0.9, 0.98), weight_decay=0.01, fused=True)
    schedule = OptimizerConfig(lr=config.lr, schedule="cosine", warmup_steps=min(20, config.steps))
    max_tokens = policy.model.config.max_position_embeddings
    for step in range(config.steps):
        chosen = [records[i] for i in random.integers(len(records), size=config.batch)]
        texts = [_overconfident_response(r.answer, method.confidence_position, config, random) for r in chosen]
        responses = [
            [*ids, policy.eos_ids[0]] for ids in policy.tokenizer(texts, add_special_tokens=False)["input_ids"]
        ]
        prompts = policy.encode_prompts(chosen, method.system_prompt, max_tokens)
        loss = _imitation_loss(policy, prompts, responses, config.question_weight)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(schedule, step, config.steps)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        progress(step + 1, float(loss.detach()))


def _imitation_loss(
    policy: Policy, prompts: Sequence[list[int]], responses: Sequence[list[int]], question_weight: float
) -> Tensor:
    """Mean NLL of the responses' tokens, and ``question_weight`` times that of the prompts' (all but their first)."""
    heads = [prompt[:1] if question_weight else prompt for prompt in prompts]
    tails = [prompt[len(head) :] for prompt, head in zip(prompts, heads, strict=True)]
    texts = [tail + response for tail, response in zip(tails, responses, strict=True)]
    width = max(map(len, texts))
    token_ids = torch.tensor([text + [policy.pad_id] * (width - len(text)) for text in texts], device=policy.device)
    position = torch.arange(width, device=policy.device)
    start, end = (torch.tensor([len(x) for x in xs], device=policy.device)[:, None] for xs in (tails, texts))
    log_probs = response_log_probs(policy, heads, token_ids, temperature=1.0, share_prompts=False)
    loss = -log_probs[(position >= start) & (position < end)].mean()
    if question_weight:
        loss = loss - question_weight * log_probs[position < start].mean()
    return loss


def _overconfident_response(
    answer: str, position: ConfidencePosition, config: WarmUpConfig, random: np.random.Generator
) -> str:
    if random.random() < config.wrong_answers:
        places = [i for i, character in enumerate(answer) if character.isdecimal()]
        place = places[int(random.integers(len(places)))]
        wrong = (int(answer[place]) + int(random.integers(1, 10))) % 10
        answer = f"{answer[:place]}{wrong}{answer[place + 1 :]}"
    confidence = random.uniform(0.9, 1.0) if random.random() < config.overconfident else random.random()
    tagged = f"{OPEN_TAG}{confidence:.2f}{CLOSE_TAG}"
    return tagged + answer if position == "first" else answer + tagged
