"""Supervised fine-tuning (SFT), and the warm-ups of the tiny model and of a model from ``model.path``.

The batches depend on the seed alone, so a stopped stage continues from its own checkpoint and ends with the same bytes.
"""

import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from coca_mindspeed.algorithm.methods import TrainingMethod
from coca_mindspeed.algorithm.parsing import CLOSE_TAG, OPEN_TAG, SEGMENTS, ConfidencePosition
from coca_mindspeed.config.schema import OptimizerConfig, RunConfig, TrainerConfig, WarmUpConfig
from coca_mindspeed.data.records import Record
from coca_mindspeed.errors import DataError, TrainingError
from coca_mindspeed.local.checkpoint import export_model, load_optimizer_state, save_checkpoint
from coca_mindspeed.local.interrupt import InterruptedRunError, interruptible, stop_request
from coca_mindspeed.local.load import load_policy
from coca_mindspeed.local.lora import dtype_of_weights, load_adapters
from coca_mindspeed.local.policy import Policy
from coca_mindspeed.local.prefill import common_prefix_length
from coca_mindspeed.local.progress import SFTProgress
from coca_mindspeed.local.run_directory import WARMED_UP, list_checkpoints
from coca_mindspeed.local.schedule import derived_seed, learning_rate
from coca_mindspeed.local.update import ResponseBatch, build_optimizer, microbatches
from coca_mindspeed.utils.files import PROGRESS


@dataclass(frozen=True, slots=True)
class SFTExample:
    """A question, and the token ids of the response to learn."""

    record: Record
    response: list[int]


#: One update's, drawn anew at each call.
DrawExamples = Callable[[np.random.Generator], Sequence[SFTExample]]


@dataclass(frozen=True)
class ResponseFormat:
    """Position and decimals of the confidences; ``spaced`` puts spaces around it, as the method's prompt does."""

    position: ConfidencePosition
    decimals: int = 2
    spaced: bool = False

    def response(self, answer: str, *confidences: float) -> str:
        """The answer with its confidences, of which there are two in position ``both``."""
        space, given = " " if self.spaced else "", iter(confidences)
        return space.join(
            answer if segment == "answer" else f"{OPEN_TAG}{space}{next(given):.{self.decimals}f}{space}{CLOSE_TAG}"
            for segment in SEGMENTS[self.position]
        )


class _DivergedError(TrainingError):
    """A loss or a gradient is not finite."""


@dataclass(frozen=True)
class SFTStage:
    """A stage of supervised training.

    Attributes:
        examples: draws the batch of one update.
        system_prompt: of the questions.
        steps: updates.
        lr: peak learning rate; 20 updates of linear warm-up, then cosine decay.
        question_weight: weight of the question tokens in the loss.
        optimizer_name: as in :class:`OptimizerConfig`.
        microbatch_tokens: most tokens in a backward pass, padding included; None: no limit.
    """

    examples: DrawExamples
    system_prompt: str
    steps: int
    lr: float
    question_weight: float = 0.0
    optimizer_name: Literal["adamw", "adamw_8bit"] = "adamw"
    microbatch_tokens: int | None = None

    def run(
        self,
        policy: Policy,
        random: np.random.Generator,
        progress: Callable[[int, float], None] = lambda step, loss: None,
        *,
        resume: tuple[int, Mapping[str, Any]] | None = None,
        after_step: Callable[[int, torch.optim.Optimizer], None] = lambda step, optimizer: None,
    ) -> None:
        """Train ``policy`` in place; ``random`` draws the batches.

        ``progress`` is called after each step with the steps done and the loss (nats per token),
        ``after_step`` with the steps done and the optimizer.  To resume, ``policy`` holds the weights after so many
        steps, and ``resume`` their number and the optimizer state.
        """
        settings = OptimizerConfig(
            name=self.optimizer_name,
            lr=self.lr,
            betas=(0.9, 0.98),
            weight_decay=0.01,
            schedule="cosine",
            warmup_steps=min(20, self.steps),
        )
        optimizer = build_optimizer(policy, settings)
        done = 0
        if resume is not None:
            done, state = resume
            optimizer.load_state_dict(dict(state))
        for step in range(self.steps):
            examples = self.examples(random)
            if step < done:  # drawn, so that later batches are the same
                continue
            prompts = policy.encode_prompts([example.record for example in examples], self.system_prompt)
            loss = self._accumulate_gradient(policy, prompts, examples)
            norm = float(torch.nn.utils.clip_grad_norm_(policy.trained_parameters(), 1.0))
            if not (math.isfinite(loss) and math.isfinite(norm)):
                raise _DivergedError(
                    f"update {step + 1} of {self.steps}: the loss is {loss}, the gradient norm {norm}; the update was "
                    f"not applied. Lower the learning rate (now {self.lr}), or check the checkpoint for NaN or inf"
                )
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(settings, step, self.steps)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            progress(step + 1, loss)
            after_step(step + 1, optimizer)

    def _accumulate_gradient(
        self, policy: Policy, prompts: Sequence[list[int]], examples: Sequence[SFTExample]
    ) -> float:
        """Run one update's backward passes; return the loss."""
        lengths, prompt_lengths = [len(example.response) for example in examples], list(map(len, prompts))
        every = range(len(prompts))
        parts = [list(every)]
        if self.microbatch_tokens is not None:
            shared = (
                0 if self.question_weight else common_prefix_length(prompts, policy.sharing)
            )  # computed once per pass
            limit = TrainerConfig(
                microbatch_prompts=None, microbatch_tokens=max(1, self.microbatch_tokens - shared), share_prompts=False
            )
            own = [length - shared for length in prompt_lengths]
            parts = [part.rows for part in microbatches(every, 1, lengths, own, limit)]
        return sum(
            sft_backward(
                policy,
                [prompts[row] for row in rows],
                [examples[row] for row in rows],
                self.question_weight,
                response_share=sum(lengths[row] for row in rows) / sum(lengths),
                question_share=sum(prompt_lengths[row] - 1 for row in rows) / max(1, sum(prompt_lengths) - len(every)),
            )
            for rows in parts
        )


def sft_microbatch_tokens(config: RunConfig) -> int:
    """The size of a training microbatch, so that a supervised stage needs no more memory than the training."""
    trainer, rollout = config.trainer, config.rollout
    if trainer.microbatch_tokens is not None:
        return trainer.microbatch_tokens
    prompts = trainer.microbatch_prompts or rollout.prompts // trainer.minibatches
    return prompts * (rollout.max_prompt_tokens + rollout.group_size * rollout.max_new_tokens)


def encode_responses(policy: Policy, texts: Sequence[str]) -> list[list[int]]:
    """Token ids of responses, each with its end-of-turn token."""
    return [[*ids, policy.end_of_turn] for ids in policy.tokenizer(list(texts), add_special_tokens=False)["input_ids"]]


def sft_backward(
    policy: Policy,
    prompts: Sequence[list[int]],
    examples: Sequence[SFTExample],
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
    texts = [tail + example.response for tail, example in zip(tails, examples, strict=True)]
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


def warm_up(
    policy: Policy,
    records: Sequence[Record],
    method: TrainingMethod,
    config: WarmUpConfig,
    seed: int,
    progress: Callable[[int, float], None] = lambda step, loss: None,
) -> None:
    """Train the tiny ``policy`` in place on over-confident responses written without spaces.

    ``progress`` is called after each step with the steps done and the loss in nats per token.
    """
    stage = overconfident_stage(policy, records, method, ResponseFormat(method.confidence_position), config)
    stage.run(policy, warm_up_generator(seed), progress)


def warm_up_generator(seed: int) -> np.random.Generator:
    return np.random.default_rng(derived_seed(seed, "warm-up"))


def overconfident_stage(
    policy: Policy,
    records: Sequence[Record],
    method: TrainingMethod,
    response_format: ResponseFormat,
    config: WarmUpConfig,
) -> SFTStage:
    """The warm-up's stage: confidences do not depend on the question, so it teaches the format and no calibration."""

    def examples(random: np.random.Generator) -> list[SFTExample]:
        chosen = [records[i] for i in random.integers(len(records), size=config.batch)]
        texts = [_overconfident_response(record.answer, response_format, config, random) for record in chosen]
        return list(map(SFTExample, chosen, encode_responses(policy, texts)))

    return SFTStage(examples, method.system_prompt, config.steps, config.lr, config.question_weight)


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
    return response_format.response(answer, *confidences)


CHECKPOINTS = "warm_up"  # within a run's directory
_DECIMALS = 2  # where the method asks for no number of them


def run_sft_warm_up(
    policy: Policy, records: Sequence[Record], config: RunConfig, output: Path, *, show_progress: bool
) -> Policy:
    """SFT warm-up on ``records`` in place, exported to ``output/warm_start``; an export that exists is loaded instead.

    The export has adapters merged and becomes the base for new adapters: the returned policy has none.  The trained
    model is freed before the export is loaded.  ``output`` is the run's directory, and may hold this warm-up, finished
    or stopped.

    Raises:
        DataError: an answer is longer than ``rollout.max_new_tokens``.
        TrainingError: a loss or a gradient is not finite.
        InterruptedRunError: Ctrl-C or SIGTERM; the warm-up is saved.
    """
    exported, checkpoints = output / WARMED_UP, output / CHECKPOINTS
    fresh = not exported.exists()
    if fresh:
        method = config.method.training_method
        decimals = config.method.confidence_decimals or _DECIMALS
        response_format = ResponseFormat(method.confidence_position, decimals, spaced=True)
        _check_lengths(policy, records, response_format, config.rollout.max_new_tokens)
        stage = overconfident_stage(policy, records, method, response_format, config.warm_up)
        tokens = sft_microbatch_tokens(config)
        stage = replace(stage, optimizer_name=config.optimizer.name, microbatch_tokens=tokens)
        _run_or_continue(stage, policy, config, checkpoints, output / PROGRESS, show_progress)
        export_model(policy, exported)
    shutil.rmtree(checkpoints, ignore_errors=True)  # left by a kill after the export
    if fresh and policy.adapters is None:
        return policy
    device = policy.device
    policy.model.to("meta")
    return load_policy(exported, config.model, device, dtype=dtype_of_weights(config.model.lora), where="warm-up")


def _run_or_continue(
    stage: SFTStage, policy: Policy, config: RunConfig, checkpoints: Path, progress_file: Path, show_progress: bool
) -> None:
    """Run the stage, from the newest of ``checkpoints`` if there is one."""
    resume, interval = None, config.checkpoint.interval
    if earlier := list_checkpoints(checkpoints):
        newest = earlier[-1]
        resume = newest.step, load_optimizer_state(newest, policy.device)
        if policy.adapters is not None:
            load_adapters(policy, newest.adapters)
        else:
            weights = load_policy(newest.model, config.model, policy.device, where="checkpoint").model
            policy.model.load_state_dict(weights.state_dict())
            del weights
    go_on = f"--resume continues from its last checkpoint in {checkpoints}, if there is one"
    done = resume[0] if resume else 0
    with (
        interruptible("stopped in the warm-up", go_on),
        stop_request() as stop,
        SFTProgress(stage.steps, show_progress, done, file=progress_file) as progress,
    ):

        def save(step: int, optimizer: torch.optim.Optimizer) -> None:
            if not stop.is_set() and (not interval or step % interval or step == stage.steps):
                return
            saved = save_checkpoint(checkpoints, step, policy, optimizer, keep=1)
            if stop.is_set():
                raise InterruptedRunError(
                    f"stopped after step {step} of the warm-up; saved {saved.path}", "continue with --resume"
                )

        try:
            stage.run(policy, warm_up_generator(config.seed), progress.advance, resume=resume, after_step=save)
        except _DivergedError as error:
            kept = list_checkpoints(checkpoints)
            last = f"; the last good weights are in {kept[-1].path}" if kept else ""
            raise TrainingError(f"warm-up, {error}{last}") from error


def _check_lengths(policy: Policy, records: Sequence[Record], response_format: ResponseFormat, most: int) -> None:
    responses = encode_responses(policy, [response_format.response(record.answer, 0.0, 0.0) for record in records])
    for record, response in zip(records, responses, strict=True):
        if len(response) > most:
            raise DataError(
                f"record {record.id!r} of {record.dataset}: its answer with a confidence has {len(response)} tokens, "
                f"and rollout.max_new_tokens={most} would cut it off; increase rollout.max_new_tokens"
            )
