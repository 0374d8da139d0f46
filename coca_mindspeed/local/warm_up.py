"""Supervised warm-up: a model learns the format of a response, and to be sure of everything.

The confidence that it is shown does not depend on the question, so nothing about calibration is taught here.  The
built-in tiny model learns to answer here as well; a model of one's own (:mod:`.format_warm_up`) can already.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from coca_mindspeed.algorithm.response import CLOSE_TAG, OPEN_TAG, ConfidencePosition
from coca_mindspeed.algorithm.rewards import TrainingMethod
from coca_mindspeed.config.schema import OptimizerConfig, WarmUpConfig
from coca_mindspeed.data.records import Record
from coca_mindspeed.local.log_probs import response_log_probs
from coca_mindspeed.local.optimizer import build_optimizer
from coca_mindspeed.local.policy import Policy
from coca_mindspeed.local.schedule import derived_seed, learning_rate


def warm_up(
    policy: Policy,
    records: Sequence[Record],
    method: TrainingMethod,
    config: WarmUpConfig,
    seed: int,
    progress: Callable[[int, float], None] = lambda step, loss: None,
    *,
    layout: "Layout | None" = None,
    optimizer_name: Literal["adamw", "adamw_8bit"] = "adamw",
    resume: tuple[int, Mapping[str, Any]] | None = None,
    after_step: Callable[[int, torch.optim.Optimizer], None] = lambda step, optimizer: None,
) -> None:
    """Train ``policy`` in place to imitate over-confident responses.

    Args:
        policy: the model to teach.
        records: questions with their answers.
        method: says where the confidence stands.
        config: see :class:`WarmUpConfig`.
        seed: draws questions, wrong digits and confidences.
        progress: called after each step with the steps done and the loss in nats a token.
        layout: of the responses; None: the tiny model's, which has no spaces.
        optimizer_name: as in :class:`OptimizerConfig`.
        resume: steps done before, and the optimizer's state after them; ``policy`` holds their weights.
        after_step: called after each step with the steps done and the optimizer, to save them or to stop.
    """
    random = np.random.default_rng(derived_seed(seed, "warm-up"))
    steps = config.steps
    settings = OptimizerConfig(
        name=optimizer_name,
        lr=config.lr,
        betas=(0.9, 0.98),
        weight_decay=0.01,
        schedule="cosine",
        warmup_steps=min(20, steps),
    )
    optimizer = build_optimizer(policy, settings)
    done = 0
    if resume is not None:
        done, state = resume
        optimizer.load_state_dict(dict(state))
    max_tokens = policy.model.config.max_position_embeddings
    layout = layout or Layout(method.confidence_position)
    for step in range(steps):
        chosen = [records[i] for i in random.integers(len(records), size=config.batch)]
        texts = [_overconfident_response(r.answer, layout, config, random) for r in chosen]
        if step < done:  # drawn all the same, so that a resumed warm-up draws what follows
            continue
        prompts = policy.encode_prompts(chosen, method.system_prompt, max_tokens)
        loss = _imitation_loss(policy, prompts, encode_responses(policy, texts), config.question_weight)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.trained_parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(settings, step, steps)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        progress(step + 1, float(loss.detach()))
        after_step(step + 1, optimizer)


@dataclass(frozen=True)
class Layout:
    """How a response is written.

    Attributes:
        position: of the confidence.
        decimals: of the confidence.
        spaced: with the spaces of the method's prompt around the confidence.
    """

    position: ConfidencePosition
    decimals: int = 2
    spaced: bool = False

    def response(self, confidence: float, answer: str) -> str:
        """The text of a response."""
        space = " " if self.spaced else ""
        tagged = f"{OPEN_TAG}{space}{confidence:.{self.decimals}f}{space}{CLOSE_TAG}"
        return f"{tagged}{space}{answer}" if self.position == "first" else f"{answer}{space}{tagged}"


def encode_responses(policy: Policy, texts: Sequence[str]) -> list[list[int]]:
    """Token ids of responses that end by themselves."""
    return [[*ids, policy.eos_ids[0]] for ids in policy.tokenizer(list(texts), add_special_tokens=False)["input_ids"]]


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
    # Whole prompts go first and by themselves, so that what all of them start with is run once.
    log_probs = response_log_probs(policy, heads, token_ids, temperature=1.0, share_prompts=not question_weight)
    loss = -log_probs[(position >= start) & (position < end)].mean()
    if question_weight:
        loss = loss - question_weight * log_probs[position < start].mean()
    return loss


def _overconfident_response(answer: str, layout: Layout, config: WarmUpConfig, random: np.random.Generator) -> str:
    if random.random() < config.wrong_answers:
        places = [i for i, character in enumerate(answer) if character.isdecimal()]
        place = places[int(random.integers(len(places)))]
        wrong = (int(answer[place]) + int(random.integers(1, 10))) % 10
        answer = f"{answer[:place]}{wrong}{answer[place + 1 :]}"
    confidence = random.uniform(0.9, 1.0) if random.random() < config.overconfident else random.random()
    return layout.response(confidence, answer)
