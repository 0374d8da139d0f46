"""The plan of a run: its steps, and its memory by a formula that docs/training.md compares with measured peaks."""

import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from coca_mindspeed.config.layout import Layout
from coca_mindspeed.config.plan import Part, Phase, Plan, Row, batch_rows, evaluations
from coca_mindspeed.config.preflight import Names, preflight
from coca_mindspeed.config.schema import RunConfig
from coca_mindspeed.errors import Problem
from coca_mindspeed.local.inputs import RunInputs
from coca_mindspeed.local.load import sharing_of
from coca_mindspeed.local.model_files import TINY_MODEL, Shapes, read_model_config, trained_bytes, weight_shapes
from coca_mindspeed.local.policy import choose_device, resolve_dtype
from coca_mindspeed.local.respond import largest_evaluation_batch
from coca_mindspeed.local.sft import sft_microbatch_tokens
from coca_mindspeed.local.static_decoder import capacity, kept_bytes, static_by_default
from coca_mindspeed.local.tiny_model import tiny_config
from coca_mindspeed.local.update import largest_group_sizes
from coca_mindspeed.utils.process import GIB, memory_left

# Bytes that a layer keeps per token for the backward pass, by its width and its MLP's; and per pair of tokens and head,
# by eager attention alone.  Fitted, as the bytes of the LM head.
_OF_WIDTHS = {"float32": (44, 16), "bfloat16": (38, 8)}
_OF_PAIR, _LM_HEAD = 8, 6 * 2**25
#: Largest estimate that is tried, as a multiple of the free memory; the formula's error (docs/training.md).
MARGIN = 1.15


class Batch(NamedTuple):
    """``prompts`` prompts of ``prompt`` tokens, and ``rows`` responses of ``response`` tokens to them."""

    prompts: int
    rows: int
    prompt: int
    response: int


class MemoryEstimate(NamedTuple):
    """Bytes besides the process and its libraries; ``decoder``: the part of ``cache`` that stays during the update."""

    weights: int
    moments: int
    logits: int
    gradients: int
    activations: int
    cache: int
    decoder: int

    @property
    def update(self) -> int:
        return self.weights + self.moments + self.logits + self.gradients + self.activations + self.decoder

    @property
    def rollout(self) -> int:
        return self.weights + self.moments + self.logits + self.cache


def layout_of(config: RunConfig) -> Layout:
    """The layout of a run on one device."""
    rollout, trainer = config.rollout, config.trainer
    mini_batch, lengths = rollout.prompts // trainer.minibatches, (rollout.max_prompt_tokens, rollout.max_new_tokens)
    return Layout(1, 1, 1, 1, rollout.prompts, rollout.group_size, mini_batch, trainer.ppo_epochs, *lengths)


def largest_microbatch(config: RunConfig) -> Batch:
    layout = layout_of(config)
    sizes = largest_group_sizes(layout.mini_batch, layout.group, layout.max_new, layout.max_prompt, config.trainer)
    return Batch(len(sizes), sum(sizes), layout.max_prompt, layout.max_new)


def largest_sample(config: RunConfig) -> Batch:
    """The most and longest responses that a step or an evaluation samples at once."""
    rollout, questions = config.rollout, largest_evaluation_batch(config)
    rows, lengths = rollout.prompts * rollout.group_size, (rollout.max_prompt_tokens, rollout.max_new_tokens)
    prompts = min(rows, rollout.batch_responses or rows) // rollout.group_size or 1
    batches = Batch(prompts, prompts * rollout.group_size, *lengths), Batch(questions, questions, *lengths)
    return max(batches, key=lambda batch: (batch.rows, batch.prompts))


def estimate_memory(config: RunConfig, architecture: Any, shapes: Shapes, device: torch.device) -> MemoryEstimate:
    """Estimate from the model's Hugging Face configuration and the shapes of its weights (empty: it has none yet)."""
    lora, batch, sample = config.model.lora, largest_microbatch(config), largest_sample(config)
    hidden, layers, heads = architecture.hidden_size, architecture.num_hidden_layers, architecture.num_attention_heads
    head = getattr(architecture, "head_dim", None) or hidden // heads
    keys = 2 * head * (getattr(architecture, "num_key_value_heads", None) or heads)  # and values
    mlp = getattr(architecture, "intermediate_size", None) or 4 * hidden
    if not shapes:  # a dense decoder with a gated MLP
        of_layer = hidden * (2 * head * heads + keys + 3 * mlp * (getattr(architecture, "num_experts", None) or 1))
        embeddings = (2 - architecture.tie_word_embeddings) * architecture.vocab_size * hidden
        shapes = {"embedding": [embeddings], "layers": [layers * of_layer]}
    numbers = sum(map(math.prod, shapes.values()))
    gradients, moments = trained_bytes(shapes, lora, config.optimizer.name)
    frozen, adapters = (4, 0) if lora.rank is None else (2 if lora.base_dtype == "bfloat16" else 4, gradients)
    dtype, sharing = resolve_dtype(config.model, device), sharing_of(architecture, config.model)
    copies = 0  # of the linear layers in bfloat16; a tied embedding is one of them
    if dtype == "bfloat16":
        linear = numbers - (0 if architecture.tie_word_embeddings else architecture.vocab_size * hidden)
        copies = 2 * (linear * (frozen == 4) + adapters // 4)

    tokens, pairs = batch.rows * batch.response, batch.rows * batch.response * (batch.prompt + batch.response)
    prompts = batch.prompts if config.trainer.share_prompts and sharing != "none" else batch.rows
    tokens, pairs = tokens + prompts * batch.prompt, pairs + prompts * batch.prompt**2
    of_hidden, of_mlp = _OF_WIDTHS[dtype]
    layer = tokens * (of_hidden * hidden + of_mlp * mlp)
    if config.model.attention == "eager" or sharing == "none":
        layer += _OF_PAIR * heads * pairs
    logits = min(_LM_HEAD, 24 * architecture.vocab_size * max(batch.rows * batch.response, sample.rows))

    cache, decoder = 4 * layers * keys * sample.rows * (sample.prompt + sample.response), 0
    if static_by_default(device, architecture.model_type, sharing, config.model.attention):
        rows, columns = capacity(sample.rows, sample.prompt + sample.response)
        buffers = (2 if dtype == "bfloat16" else 4) * layers * keys * rows * columns + copies
        cache = buffers + 4 * layers * keys * sample.prompts * sample.prompt  # the prefilled prompts
        decoder = buffers if buffers <= kept_bytes(device) else 0
    return MemoryEstimate(
        weights=frozen * numbers + adapters + copies,
        moments=moments,
        logits=max(logits, layer) if config.model.gradient_checkpointing else logits,  # or one layer that runs again
        gradients=gradients,
        activations=layers * (4 * tokens * (hidden + keys) if config.model.gradient_checkpointing else layer),
        cache=cache,
        decoder=decoder,
    )


def memory_problems(config: RunConfig, need: MemoryEstimate, room: int) -> list[Problem]:
    """A problem for each phase that needs clearly more than ``room`` bytes, with the key that bounds it."""
    trainer = config.trainer
    if (least := need.weights + need.moments + need.gradients) > room:
        reason = f"weights, gradients and moments need {least / GIB:.1f} GiB, and {room / GIB:.1f} GiB are free"
        fix = "set model.lora.rank or optimizer.name=adamw_8bit, or use a smaller model"
        return [Problem("memory-weights", "model.path", config.model.path, reason, fix)]
    update = ("trainer.microbatch_tokens", trainer.microbatch_tokens, trainer.microbatch_tokens)
    if trainer.microbatch_tokens is None:
        update = ("trainer.microbatch_prompts", trainer.microbatch_prompts, largest_microbatch(config).prompts)
    rollout = ("rollout.batch_responses", config.rollout.batch_responses, largest_sample(config).rows)
    problems = []
    for phase, total, (key, value, size) in (("update", need.update, update), ("rollout", need.rollout, rollout)):
        if total <= MARGIN * room:
            continue
        reason = f"the {phase} needs about {total / GIB:.1f} GiB by formula, and {room / GIB:.1f} are free"
        fix = f"set {key} below {size}, lower rollout.max_new_tokens, set model.lora.rank, or use a smaller model"
        if phase == "update" and not config.model.gradient_checkpointing:
            fix = f"set model.gradient_checkpointing=true, or {fix}"
        problems.append(Problem(f"memory-{phase}", key, value, reason, fix))
    return problems


def free_bytes(device: torch.device) -> int:
    """Memory that the run can take besides what this process and others have already."""
    if device.type != "cpu":
        return int(getattr(torch, device.type).mem_get_info()[0])
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii")
        free = 1024 * int(lines.partition("MemAvailable:")[2].split()[0])
    except OSError:  # not Linux
        free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    left = memory_left()
    return free if left is None else min(free, left)


_FORMULA = (
    "formula for prompts of {} and responses of {} tokens, the longest; Python and its libraries come on top "
    "(docs/training.md, Memory)"
)


def make_plan(config: RunConfig, name: str = "a run", inputs: RunInputs | None = None) -> Plan:
    """Plan a run whose number of steps is known and whose model is here; the problems are those of its memory.

    ``inputs`` has the run's records; None: their questions are unknown.
    """
    device, path, data = choose_device(config.trainer.device), config.model.path, config.data
    architecture = tiny_config() if path is None else read_model_config(Path(path), config.model)
    shapes = TINY_MODEL if path is None else weight_shapes(Path(path))
    need, room, layout = estimate_memory(config, architecture, shapes, device), free_bytes(device), layout_of(config)
    files: tuple[tuple[str, Any], ...] = ("data.train", data.train), ("data.evaluate", data.evaluate)
    if data.name != "records":
        files = ("data.train_size", data.train_size), ("data.evaluate_size", data.evaluate_size)
    return preflight(
        f"{name} on {device}",
        config.method,
        Names("method=coca_stable", "rollout.max_new_tokens", *files),
        layout,
        problems=() if path is None else memory_problems(config, need, room),
        memory=_memory(need, room),
        questions=lambda: None if inputs is None else inputs.questions,
        rows=_rows(config, shapes),
        notes=[_FORMULA.format(layout.max_prompt, layout.max_new)],
    )


def _rows(config: RunConfig, shapes: Shapes) -> Iterator[Row]:
    data, rollout, trainer, warm_up = config.data, config.rollout, config.trainer, config.warm_up
    yield "method", config.method.name
    yield "learning rate", f"{config.optimizer.lr:g}"
    files = {"data.train": data.train, "data.evaluate": data.evaluate, "model.path": config.model.path}
    yield from ((key, path) for key, path in files.items() if path is not None)
    if warm_up.records is not None:
        passes = f"warm_up, {warm_up.steps} updates of {warm_up.batch} responses to {warm_up.records}"
        yield "before training", f"{passes}, at most {sft_microbatch_tokens(config):,} tokens a pass"
    layout = layout_of(config)
    yield from batch_rows("step", layout)
    of_prompts = f"{trainer.microbatch_prompts or layout.mini_batch} prompts"
    tokens = trainer.microbatch_tokens
    yield "microbatches", of_prompts if tokens is None else f"up to {tokens} tokens"
    yield "tokens", f"{rollout.max_prompt_tokens} + {rollout.max_new_tokens} at most"
    yield "length", f"{trainer.steps} steps per stage"
    yield "evaluation while training", evaluations(config, "steps")
    interval, size = config.checkpoint.interval, sum(trained_bytes(shapes, config.model.lora, config.optimizer.name))
    when = f"every {interval} steps" if interval else "at the last step"
    when += "" if (minutes := config.checkpoint.minutes) is None else f" and every {minutes:g} minutes"
    yield "checkpoints", f"{size / 1e6:,.0f} MB {when}, the newest {config.checkpoint.keep} are kept"


def _memory(need: MemoryEstimate, room: int) -> tuple[Phase, ...]:
    """The two phases of a step, which take turns in ``room`` bytes."""
    kept = [Part(name, getattr(need, name)) for name in ("weights", "moments", "logits")]
    update = [*kept, Part("gradients", need.gradients), Part("activations", need.activations)]
    if need.decoder:
        update.append(Part("buffers of decoding", need.decoder, "kept for the next rollout"))
    sampling = [*kept, Part("KV cache", need.cache, "at the end of the longest responses")]
    limit = room / GIB
    return Phase("update", tuple(update), limit), Phase("rollout", tuple(sampling), limit)
