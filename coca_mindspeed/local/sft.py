"""Supervised fine-tuning (SFT): the warm-ups of the tiny model and of a model from ``model.path``.

The batches depend on the seed alone, so a stopped warm-up continues from its checkpoint and ends with the same bytes.
"""

import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from coca_mindspeed.algorithm.methods import MethodSettings
from coca_mindspeed.algorithm.parsing import SEGMENTS, THINK_TAG, ResponseFormat
from coca_mindspeed.config.schema import OptimizerConfig, RunConfig, TrainerConfig, WarmUpConfig
from coca_mindspeed.data.prompts import opens_thought
from coca_mindspeed.data.records import Record
from coca_mindspeed.errors import TrainingError
from coca_mindspeed.local.checkpoint import export_model, load_optimizer_state, save_checkpoint
from coca_mindspeed.local.inputs import warm_up_format
from coca_mindspeed.local.load import load_policy
from coca_mindspeed.local.policy import Policy, dtype_of_weights, load_adapters
from coca_mindspeed.local.prefill import common_prefix_length
from coca_mindspeed.local.run_directory import WARMED_UP, list_checkpoints
from coca_mindspeed.local.schedule import derived_seed, learning_rate
from coca_mindspeed.local.update import ResponseBatch, build_optimizer, microbatches
from coca_mindspeed.utils.directories import PROGRESS
from coca_mindspeed.utils.process import InterruptedRunError, interruptible, stop_request
from coca_mindspeed.utils.progress import StepProgress
from coca_mindspeed.utils.saving import CheckpointTimer


def warm_up(
    policy: Policy,
    records: Sequence[Record],
    method: MethodSettings,
    config: WarmUpConfig,
    seed: int,
    progress: StepProgress | None = None,
    *,
    response_format: ResponseFormat | None = None,
    optimizer_name: Literal["adamw", "adamw_8bit"] = "adamw",
    microbatch_tokens: int | None = None,
    resume: tuple[int, Mapping[str, Any]] | None = None,
    after_step: Callable[[int, torch.optim.Optimizer], None] = lambda step, optimizer: None,
) -> None:
    """Train ``policy`` in place on over-confident responses, which teach the format and no calibration.

    With thinking, the responses end behind the confidence that begins the thought, which stays the model's own.
    ``progress`` shows the loss in nats per token.  ``response_format`` None: without spaces, as the tiny model writes.
    ``microbatch_tokens`` bounds a backward pass, padding included.  ``resume``: steps whose weights ``policy`` holds,
    and the optimizer's state.  ``after_step`` is called last in each step, with the steps done.  Raises TrainingError
    if a loss or a gradient is not finite.
    """
    response_format = response_format or ResponseFormat(
        method.training_method.confidence_position, thinking=method.thinking
    )
    opening = _opening(policy, records[0], method) if method.thinking else None
    settings = OptimizerConfig(
        name=optimizer_name,
        lr=config.lr,
        betas=(0.9, 0.98),
        weight_decay=0.01,
        schedule="cosine",
        warmup_steps=min(20, config.steps),
    )
    optimizer = build_optimizer(policy, settings)
    done, state = resume or (0, None)
    if state is not None:
        optimizer.load_state_dict(dict(state))
    random = np.random.default_rng(derived_seed(seed, "warm-up"))
    for step in range(config.steps):
        chosen = [records[i] for i in random.integers(len(records), size=config.batch)]
        texts = [_overconfident_response(record.answer, response_format, config, random) for record in chosen]
        if step < done:  # drawn, so that later batches are the same
            continue
        responses = encode_responses(policy, texts) if opening is None else _encode_openings(policy, texts, opening)
        prompts = policy.encode_prompts(chosen, method.system_prompt)
        loss = accumulate_gradient(policy, prompts, responses, config.question_weight, microbatch_tokens)
        norm = float(torch.nn.utils.clip_grad_norm_(policy.trained_parameters(), 1.0))
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise TrainingError(
                f"warm-up, update {step + 1} of {config.steps}: the loss is {loss}, the gradient norm {norm}; lower "
                f"warm_up.lr={config.lr}, or check the checkpoint for NaN or inf"
            )
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(settings, step, config.steps)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if progress is not None:
            progress.show(step + 1, f"loss {loss:.3f}")
        after_step(step + 1, optimizer)


def accumulate_gradient(
    policy: Policy,
    prompts: Sequence[list[int]],
    responses: Sequence[list[int]],
    question_weight: float = 0.0,
    microbatch_tokens: int | None = None,
) -> float:
    """Run the backward passes of one update, and return its loss; see :func:`sft_backward`."""
    lengths, prompt_lengths = list(map(len, responses)), list(map(len, prompts))
    every = range(len(prompts))
    parts = [list(every)]
    if microbatch_tokens is not None:
        # Computed once per pass.
        shared = 0 if question_weight else common_prefix_length(prompts, policy.sharing)
        limit = TrainerConfig(microbatch_tokens=max(1, microbatch_tokens - shared), share_prompts=False)
        own = [length - shared for length in prompt_lengths]
        parts = microbatches(every, 1, lengths, own, limit)
    return sum(
        sft_backward(
            policy,
            [prompts[row] for row in rows],
            [responses[row] for row in rows],
            question_weight,
            response_share=sum(lengths[row] for row in rows) / sum(lengths),
            question_share=sum(prompt_lengths[row] - 1 for row in rows) / max(1, sum(prompt_lengths) - len(every)),
        )
        for rows in parts
    )


def sft_microbatch_tokens(config: RunConfig) -> int:
    """The size of a training microbatch, so that supervised training needs no more memory than the training."""
    trainer, rollout = config.trainer, config.rollout
    if trainer.microbatch_tokens is not None:
        return trainer.microbatch_tokens
    prompts = trainer.microbatch_prompts or rollout.prompts // trainer.minibatches
    return prompts * (rollout.max_prompt_tokens + rollout.group_size * rollout.max_new_tokens)


def encode_responses(policy: Policy, texts: Sequence[str]) -> list[list[int]]:
    """Token ids of responses, each with its end-of-turn token."""
    return [[*ids, policy.end_of_turn] for ids in policy.tokenizer(list(texts), add_special_tokens=False)["input_ids"]]


def _encode_openings(policy: Policy, texts: Sequence[str], opening: str) -> list[list[int]]:
    """Token ids of the beginnings of responses, without an end-of-turn token."""
    ids: list[list[int]] = policy.tokenizer([opening + text for text in texts], add_special_tokens=False)["input_ids"]
    return ids


def _opening(policy: Policy, record: Record, method: MethodSettings) -> str:
    """The tag that begins a thought, unless the chat template writes it."""
    return "" if opens_thought(policy.tokenizer, record, method.system_prompt) else f"{THINK_TAG}\n"


def sft_backward(
    policy: Policy,
    prompts: Sequence[list[int]],
    responses: Sequence[list[int]],
    question_weight: float = 0.0,
    *,
    response_share: float = 1.0,
    question_share: float = 1.0,
) -> float:
    """Accumulate the gradient of a microbatch, and return its loss.

    The loss is the mean NLL of response tokens plus ``question_weight`` times that of all but the first prompt
    token. The shares are the microbatch's fractions of the update's response and prompt tokens.
    """
    heads = [prompt[:1] if question_weight else prompt for prompt in prompts]
    tails = [prompt[len(head) :] for prompt, head in zip(prompts, heads, strict=True)]
    texts = [tail + response for tail, response in zip(tails, responses, strict=True)]
    width = max(map(len, texts))
    token_ids = torch.tensor([text + [policy.pad_id] * (width - len(text)) for text in texts], device=policy.device)
    position = torch.arange(width, device=policy.device)
    start, end = (torch.tensor([len(x) for x in xs], device=policy.device)[:, None] for xs in (tails, texts))
    inside, asked = (position >= start) & (position < end), position < start

    def loss_of(log_probs: Tensor) -> Tensor:
        loss = -log_probs[inside].mean() * response_share
        if question_weight:
            loss = loss - question_weight * log_probs[asked].mean() * question_share
        return loss

    # Without question tokens in the loss, prompts are prefilled and their common prefix is shared.
    batch = ResponseBatch(policy, heads, token_ids, 1.0, share_prompts=not question_weight)
    return float(loss_of(batch.backward(loss_of).log_probs))


def _overconfident_response(
    answer: str, response_format: ResponseFormat, config: WarmUpConfig, random: np.random.Generator
) -> str:
    if random.random() < config.wrong_answers:
        places = [i for i, character in enumerate(answer) if character.isdecimal()]
        place = places[int(random.integers(len(places)))]
        wrong = (int(answer[place]) + int(random.integers(1, 10))) % 10
        answer = f"{answer[:place]}{wrong}{answer[place + 1 :]}"
    confidences = [
        random.uniform(0.9, 1.0) if random.random() < config.overconfident else random.random()
        for _ in SEGMENTS[response_format.position][1:]
    ]
    if response_format.thinking:
        return response_format.stated(confidences[0])
    return response_format.response(answer, *confidences)


def sft_progress(steps: int, show_progress: bool, output: Path, done: int = 0) -> StepProgress:
    """The progress of a warm-up whose run has the directory ``output``."""
    return StepProgress(steps, show_progress, done, title="warm-up ", file=output / PROGRESS)


CHECKPOINTS = "warm_up"  # within a run's directory


def run_sft_warm_up(
    policy: Policy, records: Sequence[Record], config: RunConfig, output: Path, *, show_progress: bool
) -> Policy:
    """SFT warm-up on ``records`` in place, exported to ``output/warm_start``; an export that exists is loaded instead.

    The export has adapters merged and becomes the base for new adapters: the returned policy has none.  ``output`` is
    the run's directory, and may hold this warm-up, finished or stopped.  Raises TrainingError as :func:`warm_up`, and
    InterruptedRunError if stopped; it is saved.
    """
    exported, checkpoints = output / WARMED_UP, output / CHECKPOINTS
    fresh = not exported.exists()
    if fresh:
        method, steps = config.method, config.warm_up.steps
        response_format = warm_up_format(config.method)
        resume = _continued(policy, config, checkpoints)
        go_on = f"--resume continues from its last checkpoint in {checkpoints}, if there is one"
        with (
            interruptible("stopped in the warm-up", go_on),
            stop_request() as stop,
            sft_progress(steps, show_progress, output, resume[0] if resume else 0) as progress,
        ):
            timer = CheckpointTimer(config.checkpoint.minutes)

            def save(step: int, optimizer: torch.optim.Optimizer) -> None:
                interval = config.checkpoint.interval
                due = timer.is_due(step) or (interval and step % interval == 0)
                if stop.is_set() or (due and step < steps):
                    saved = save_checkpoint(checkpoints, step, policy, optimizer, keep=1)
                    timer.saved(step)
                    if stop.is_set():
                        where = f"stopped after step {step} of the warm-up; saved {saved.path}"
                        raise InterruptedRunError(where, "continue with --resume")

            warm_up(
                policy,
                records,
                method,
                config.warm_up,
                config.seed,
                progress,
                response_format=response_format,
                optimizer_name=config.optimizer.name,
                microbatch_tokens=sft_microbatch_tokens(config),
                resume=resume,
                after_step=save,
            )
        export_model(policy, exported)
    shutil.rmtree(checkpoints, ignore_errors=True)  # left by a kill after the export
    if fresh and policy.adapters is None:
        return policy
    device = policy.device
    policy.model.to("meta")
    return load_policy(exported, config.model, device, dtype=dtype_of_weights(config.model.lora), where="warm-up")


def _continued(policy: Policy, config: RunConfig, checkpoints: Path) -> tuple[int, Mapping[str, Any]] | None:
    """Load the newest checkpoint of a stopped warm-up into ``policy``; its step and optimizer state, None without."""
    if not (earlier := list_checkpoints(checkpoints)):
        return None
    newest = earlier[-1]
    if policy.adapters is not None:
        load_adapters(policy, newest.adapters)
    else:
        weights = load_policy(newest.model, config.model, policy.device, where="checkpoint").model
        policy.model.load_state_dict(weights.state_dict())
    return newest.step, load_optimizer_state(newest, policy.device)
