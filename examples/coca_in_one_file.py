"""CoCA in one file: sample, grade, compute advantages, update, with torch, transformers and ``coca_mindspeed``.

    coca-mindspeed demo --output runs/demo                       # makes the tiny model that this starts from
    python examples/coca_in_one_file.py runs/demo/warm_start --steps 300

The model answers sums such as ``2100+4300=`` (12 + 34, units first) by ``<confidence>0.83</confidence>64``.  Of G
answers to a sum, a share is right: GESR, the group's empirical success rate.  The tokens of the confidence learn from
how close to GESR it is, the tokens of the answer from whether it is right.

What the engine in ``coca_mindspeed/local`` has besides: prompts of any length and any model, a KV cache, prompts that
run once for their group, log-probs by chunks, graders, checkpoints, evaluation, logs.  Given the same seed, both take
the same first step, which ``tests/local/test_one_file.py`` shows.
"""

import argparse
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from coca_mindspeed import (
    SegmentMasks,
    coca_advantages,
    method_settings,
    parse_response,
    segment_objective,
    token_text,
    training_method,
)
from coca_mindspeed.data.arithmetic import arithmetic_records

METHOD = training_method("coca")


@dataclass(frozen=True)
class Settings:
    """The demo's, by the names in docs/configuration.md."""

    prompts: int = 64
    group_size: int = 8
    max_new_tokens: int = 16
    minibatches: int = 2
    lr: float = 5e-4
    betas: tuple[float, float] = (0.9, 0.95)
    clip: float = 0.2
    grad_clip: float = 1.0
    advantage_eps: float = 0.05
    confidence_decimals: int = 2
    max_confidence_tokens: int = 6


@dataclass(frozen=True)
class Rollout:
    """G responses to each of P prompts; row ``p * G + g`` is response g to prompt p.

    Attributes:
        prompt_ids: int64 ``[P, prompt]``.
        token_ids: int64 ``[P * G, T]``, PAD behind each response's end.
        lengths: int64 ``[P * G]``.
        log_probs: float32 ``[P * G, T]`` under the policy that sampled.
    """

    prompt_ids: Tensor
    token_ids: Tensor
    lengths: Tensor
    log_probs: Tensor


def encode(tokenizer: Any, questions: list[str]) -> Tensor:
    """Prompts by the chat template, int64 ``[P, prompt]``; all of one length, so that nothing needs a mask."""
    chats = [
        [{"role": "system", "content": METHOD.system_prompt}, {"role": "user", "content": question}]
        for question in questions
    ]
    texts = [tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False) for chat in chats]
    rows = tokenizer(texts, add_special_tokens=False)["input_ids"]
    if len(set(map(len, rows))) != 1:
        raise ValueError(f"prompts should be of one length, found {sorted(set(map(len, rows)))}")
    return torch.tensor(rows)


def next_token_logits(model: Any, ids: Tensor, pad_id: int) -> Tensor:
    """Logits of what follows each token of ``ids``, float32 ``[rows, tokens, vocabulary]``; PAD cannot follow."""
    logits: Tensor = model(input_ids=ids, use_cache=False).logits.float()
    banned = torch.arange(logits.shape[-1]) == pad_id
    return logits.masked_fill(banned, -torch.inf)


def draw(probabilities: Tensor, generator: torch.Generator) -> Tensor:
    """A token ``[rows, 1]`` of each row: where the sum of its probabilities passes a uniform number."""
    sums = probabilities.cumsum(dim=1)
    total = sums[:, -1:].contiguous()
    uniform = torch.rand(len(sums), 1, generator=generator)
    return torch.searchsorted(sums, uniform * total, right=True).minimum(torch.searchsorted(sums, total))


@torch.no_grad()
def sample(model: Any, tokenizer: Any, prompt_ids: Tensor, settings: Settings, generator: torch.Generator) -> Rollout:
    """Sample at temperature 1, running the whole text anew for every token: slow, and nothing to get wrong."""
    ids = prompt_ids.repeat_interleave(settings.group_size, dim=0)
    rows = len(ids)
    token_ids = torch.full((rows, settings.max_new_tokens), tokenizer.pad_token_id)
    log_probs = torch.zeros(rows, settings.max_new_tokens)
    lengths = torch.full((rows,), settings.max_new_tokens)
    row = torch.arange(rows)  # where those that go on belong
    for t in range(settings.max_new_tokens):
        distribution = next_token_logits(model, ids, tokenizer.pad_token_id)[:, -1].log_softmax(dim=-1)
        token = draw(distribution.exp(), generator)
        token_ids[row, t] = token[:, 0]
        log_probs[row, t] = distribution.gather(1, token)[:, 0]
        going = token[:, 0] != tokenizer.eos_token_id
        lengths[row[~going]] = t + 1
        if not going.any():
            break
        row, ids = row[going], torch.cat([ids, token], dim=1)[going]
    width = int(lengths.max())
    return Rollout(prompt_ids, token_ids[:, :width], lengths, log_probs[:, :width])


def grade(rollout: Rollout, text: Any, gold: list[str], settings: Settings) -> list[bool]:
    """Whether each answer is right, ``[P * G]``."""
    responses = text.decode(rollout.token_ids, rollout.lengths)
    answers = [parse_response(response, decimals=settings.confidence_decimals).answer for response in responses]
    return [answer.strip() == gold[i // settings.group_size] for i, answer in enumerate(answers)]


def update(
    model: Any,
    pad_id: int,
    rollout: Rollout,
    advantages: Tensor,
    masks: SegmentMasks,
    optimizer: torch.optim.Optimizer,
    settings: Settings,
) -> float:
    """One update for each minibatch of whole groups, by the clipped objective; the mean loss."""
    prompts, (_, width) = len(rollout.prompt_ids), rollout.token_ids.shape
    ids = torch.cat([rollout.prompt_ids.repeat_interleave(settings.group_size, dim=0), rollout.token_ids], dim=1)
    losses = []
    for chosen in torch.arange(prompts).chunk(settings.minibatches):
        rows = (chosen[:, None] * settings.group_size + torch.arange(settings.group_size)).flatten()
        logits = next_token_logits(model, ids[rows, :-1], pad_id)[:, -width:]
        log_probs = logits.log_softmax(dim=-1).gather(-1, rollout.token_ids[rows, :, None]).squeeze(-1)
        loss = segment_objective(
            log_probs,
            rollout.log_probs[rows],
            advantages[rows],
            {name: mask[rows] for name, mask in masks.items()},
            clip=settings.clip,
        ).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings.grad_clip)
        optimizer.step()
        losses.append(float(loss.detach()))
    return sum(losses) / len(losses)


def step(
    model: Any,
    tokenizer: Any,
    text: Any,
    questions: list[str],
    gold: list[str],
    optimizer: torch.optim.Optimizer,
    generator: torch.Generator,
    settings: Settings,
) -> dict[str, float]:
    """One step of the paper's Algorithm 1."""
    rollout = sample(model, tokenizer, encode(tokenizer, questions), settings, generator)
    result = coca_advantages(
        rollout.token_ids,
        rollout.lengths,
        grade(rollout, text, gold, settings),
        text,
        settings.group_size,
        method=method_settings(
            confidence_decimals=settings.confidence_decimals,
            max_confidence_tokens=settings.max_confidence_tokens,
            advantage_eps=settings.advantage_eps,
        ),
    )
    loss = update(model, tokenizer.pad_token_id, rollout, result.advantages, result.masks, optimizer, settings)
    return {
        "accuracy": result.metrics["rollout/accuracy"],
        "confidence": result.metrics["rollout/confidence"],
        "confidence reward": result.metrics["reward/confidence"],
        "invalid": result.metrics["rollout/invalid_share"],
        "loss": loss,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="CoCA on the tiny model, in one file")
    parser.add_argument("model", type=Path, help="runs/demo/warm_start")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    text, settings = token_text(tokenizer, model.config.vocab_size), Settings()
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.lr, betas=settings.betas, weight_decay=0.0)
    generator, draw = torch.Generator().manual_seed(arguments.seed), random.Random(arguments.seed)
    records = arithmetic_records(50_000, "train", seed=0)
    for number in range(1, arguments.steps + 1):
        chosen = draw.sample(records, settings.prompts)
        questions, gold = [record.question for record in chosen], [record.answer for record in chosen]
        metrics = step(model, tokenizer, text, questions, gold, optimizer, generator, settings)
        if number == 1 or number % 10 == 0:
            print(f"step {number}: " + ", ".join(f"{name} {value:.3f}" for name, value in metrics.items()))


if __name__ == "__main__":
    main()
