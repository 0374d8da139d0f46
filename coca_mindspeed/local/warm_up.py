"""Supervised warm-up of the tiny model: it learns to answer, and to be sure of everything.

The confidence that it is shown does not depend on the question, so nothing about calibration is taught here.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch

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
        width = max(map(len, responses))
        token_ids = torch.tensor([r + [policy.pad_id] * (width - len(r)) for r in responses], device=policy.device)
        inside = torch.tensor([[t < len(r) for t in range(width)] for r in responses], device=policy.device)
        prompts = policy.encode_prompts(chosen, method.system_prompt, max_tokens)
        log_probs = response_log_probs(policy, prompts, token_ids, temperature=1.0, share_prompts=False)
        loss = -log_probs[inside].mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(schedule, step, config.steps)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        progress(step + 1, float(loss.detach()))


def _overconfident_response(
    answer: str, position: ConfidencePosition, config: WarmUpConfig, random: np.random.Generator
) -> str:
    if random.random() < config.wrong_answers:
        place = int(random.integers(len(answer)))
        wrong = (int(answer[place]) + int(random.integers(1, 10))) % 10
        answer = f"{answer[:place]}{wrong}{answer[place + 1 :]}"
    confidence = random.uniform(0.9, 1.0) if random.random() < config.overconfident else random.random()
    tagged = f"{OPEN_TAG}{confidence:.2f}{CLOSE_TAG}"
    return tagged + answer if position == "first" else answer + tagged
