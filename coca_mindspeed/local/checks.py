"""Checks of a local run before its model is loaded: tokenizer and prompts, and memory of the device."""

import bisect
import json
import os
import re
import resource
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from coca_mindspeed.config.checks import Problem, refuse
from coca_mindspeed.config.model_size import GIB
from coca_mindspeed.config.schema import ModelConfig, RunConfig
from coca_mindspeed.data.chat_template import TEMPLATE_KEYS, TemplateKeys, check_template
from coca_mindspeed.data.records import Record
from coca_mindspeed.errors import DataError
from coca_mindspeed.local.experience import largest_evaluation_batch
from coca_mindspeed.local.memory import MemoryEstimate, NotEstimatedError, estimate_memory
from coca_mindspeed.local.model_files import (
    ContextLimit,
    load_tokenizer,
    read_context_limit,
    read_model_config,
    render_prompts,
)
from coca_mindspeed.local.policy import has_bfloat16
from coca_mindspeed.local.progress import StepProgress
from coca_mindspeed.utils.console import print_text
from coca_mindspeed.utils.limits import memory_limit

_CHUNK = 1000  # prompts checked at a time; small enough to show progress
_CONTROL_TOKEN = re.compile(r"<.+>|\[.+\]")  # <pad>, <|endoftext|>, [PAD]
_SILENT = 3.0  # seconds before progress is shown
_CONTEXT = GIB // 2  # estimated memory of CUDA's or CANN's context before the first tensor
_STEPS = 16  # granularity of the suggested trainer.microbatch_tokens
_SMALL = 20_000_000  # parameters; smaller models are not estimated, so that their runs start at once


@dataclass(frozen=True)
class LengthLimits:
    """Longest prompt and response in tokens, and the keys or options that set them."""

    prompt: int
    response: int
    prompt_key: str = "rollout.max_prompt_tokens"
    response_key: str = "rollout.max_new_tokens"


def emulated_dtype(model: ModelConfig, device: torch.device) -> Problem | None:
    """A warning if the processor emulates the compute dtype.

    On an Intel Xeon without bfloat16 instructions an update of a 135M model takes three times as long in bfloat16.
    """
    if model.compute_dtype != "bfloat16" or device.type != "cpu" or not hasattr(torch.cpu, "get_capabilities"):
        return None
    if torch.cpu.get_capabilities().get("architecture") != "x86_64" or has_bfloat16(device):
        return None
    reason = "is emulated: this processor has no bfloat16 instructions"
    fix = "model.compute_dtype=float32 is several times faster"
    return Problem("emulated-dtype", "model.compute_dtype", model.compute_dtype, reason, fix)


def check_prompts(
    path: Path,
    model: ModelConfig,
    records: Sequence[Record],
    system_prompt: str | None,
    limits: LengthLimits,
    *,
    where: str = "model.path",
    keys: TemplateKeys = TEMPLATE_KEYS,
    show_progress: bool = True,
) -> None:
    """Refuse prompts that the model in ``path`` cannot process, without reading its weights.

    Raises:
        ConfigError: no tokenizer, no chat template, or one that refuses the prompt, drops a message, ends the prompt
            inside an open thought or reads the clock; token ids beyond the embedding; sequences beyond its context.
        DataError: a prompt is empty, too long or not text; it names the record.
    """
    tokenizer = load_tokenizer(path, model, where=where)
    context = read_context_limit(path, model, where=where)
    shown = f"{where}={path}"
    check_token_ids(tokenizer, read_model_config(path, model, where=where), records, system_prompt, where, path)
    check_template(tokenizer, records, system_prompt, shown, keys, allow_open_thinking=model.allow_open_thinking)
    check_lengths(tokenizer, context, records, system_prompt, limits, shown, show_progress)


def check_token_ids(
    tokenizer: Any, architecture: Any, records: Sequence[Record], system_prompt: str | None, where: str, path: Path
) -> None:
    """Raise ConfigError for ids of padding, end of sequence or prompts without a row in the model's embedding."""
    rows = getattr(architecture, "vocab_size", None)
    if rows is None:
        return
    resize = f"model.resize_token_embeddings({len(tokenizer)}) and save_pretrained"
    reason = f"its embedding has {rows} rows (vocab_size in config.json), its tokenizer gives"
    for name in ("pad_token", "eos_token"):
        token_id = getattr(tokenizer, f"{name}_id")
        if token_id is not None and token_id >= rows:
            reason = f"{reason} {name} {getattr(tokenizer, name)!r} the id {token_id}"
            refuse([Problem("token-id", where, str(path), reason, f"{resize}, or name another {name}")])
    if all(token_id < rows for token_id in tokenizer.get_vocab().values()):
        return
    for start in range(0, len(records), _CHUNK):
        chunk = records[start : start + _CHUNK]
        encoded = tokenizer(render_prompts(tokenizer, chunk, system_prompt), add_special_tokens=False)["input_ids"]
        for record, ids in zip(chunk, encoded, strict=True):
            if ids and (token_id := max(ids)) >= rows:
                token = tokenizer.convert_ids_to_tokens(token_id)
                reason = (
                    f"{reason} {token!r} in the prompt of record {record.id!r} of {record.dataset} the id {token_id}"
                )
                refuse([Problem("token-id", where, str(path), reason, resize)])


def ordinary_pad_token(tokenizer: Any) -> str | None:
    """The padding token if it is a piece of ordinary text, which the policy could then never write; else None."""
    token, pad_id = tokenizer.pad_token, tokenizer.pad_token_id
    if pad_id is None or pad_id == tokenizer.eos_token_id or _CONTROL_TOKEN.fullmatch(token):
        return None
    vocabulary = json.loads(tokenizer.backend_tokenizer.to_str())["model"].get("vocab") or {}
    pieces = vocabulary if isinstance(vocabulary, dict) else {piece for piece, *_ in vocabulary}  # Unigram: a list
    return str(token) if token in pieces else None


def check_lengths(
    tokenizer: Any,
    context: ContextLimit | None,
    records: Sequence[Record],
    system_prompt: str | None,
    limits: LengthLimits,
    model: str,
    show_progress: bool,
) -> None:
    """Refuse prompts beyond the limit, and sequences beyond the context of ``model`` (its name in messages).

    A token stands for at least one byte of the normalised text, whose length :func:`_most_bytes` bounds, so short texts
    are not tokenized.
    """
    room = limits.prompt if context is None else min(limits.prompt, context.tokens - limits.response)
    with StepProgress(len(records), show_progress, title="checking prompts", patience=_SILENT) as progress:
        for start in range(0, len(records), _CHUNK):
            texts = render_prompts(tokenizer, chunk := records[start : start + _CHUNK], system_prompt)
            doubtful = [
                (record, text)
                for record, text in zip(chunk, texts, strict=True)
                if not text or _most_bytes(text) > room
            ]
            ids = tokenizer([text for _, text in doubtful], add_special_tokens=False)["input_ids"] if doubtful else []
            for (record, _), length in zip(doubtful, map(len, ids), strict=True):
                if not 0 < length <= limits.prompt:
                    raise DataError(
                        f"record {record.id!r} of {record.dataset}: its prompt has {length} tokens, expected "
                        f"1 to {limits.prompt} ({limits.prompt_key})"
                    )
                if context is not None and length + limits.response > context.tokens:
                    reason = (
                        f"with the prompt of record {record.id!r} of {record.dataset} ({length} tokens) exceeds the "
                        f"{context.tokens} tokens of {model}: {context.reason}"
                    )
                    fix = f"set it to {context.tokens - length} or less"
                    refuse([Problem("context", limits.response_key, limits.response, reason, fix)])
            progress.show(start + len(chunk))


def _most_bytes(text: str) -> int:
    """Most bytes of a text's normal form.

    NFKC and NFKD expand a character up to 11 times, NFC and NFD 3 times, as SentencePiece a space, and it adds one.
    """
    return (3 if text.isascii() else 11) * len(text.encode()) + 3


def check_memory(config: RunConfig, path: Path, device: torch.device) -> None:
    """Refuse a run whose estimate exceeds its device, before its weights are read.

    An architecture that cannot be estimated passes with a warning.
    """
    architecture = read_model_config(path, config.model)
    if _least_parameters(architecture) < _SMALL:
        return
    try:
        run = estimate_memory(config, architecture)
    except NotEstimatedError as error:
        print_text(f"warning: {error}", sys.stderr)
        return
    refuse(memory_problems(run, device_bytes(device) - process_bytes(device), config, architecture))


def memory_problems(run: MemoryEstimate, room: int, config: RunConfig, architecture: Any) -> list[Problem]:
    """A problem for each phase that does not fit into ``room`` bytes, with the nearest value that does.

    Memory of other processes is not subtracted.
    """
    available = f"and the device has {room / GIB:.1f} beside the process"
    problems = []
    for knob in (_update_knob(config), _rollout_knob(config)):
        if (peak := knob.peak(run)) > room:
            reason = f"the {knob.phase} needs {peak / GIB:.1f} GiB, {available}"
            fix = _remedy(knob, run, config, architecture, room)
            problems.append(Problem(f"memory-{knob.phase}", knob.key, knob.value, reason, fix))
    if run.merged and (peak := run.export_peak) > room:
        reason = f"merging the adapters needs {peak / GIB:.1f} GiB, {available}"
        fix = "use a machine with more memory, or a smaller model"
        problems.append(Problem("memory-export", "model.lora.rank", config.model.lora.rank, reason, fix))
    return problems


@dataclass(frozen=True)
class _Knob:
    """A setting that limits the memory of a phase; ``choices`` ascend to the one that means the present value."""

    phase: str
    key: str
    value: int | None
    choices: Sequence[int]

    def peak(self, run: MemoryEstimate) -> int:
        return run.update_peak if self.phase == "update" else run.rollout_peak


def _update_knob(config: RunConfig) -> _Knob:
    trainer, rollout = config.trainer, config.rollout
    if (tokens := trainer.microbatch_tokens) is None:
        prompts = trainer.microbatch_prompts or rollout.prompts // trainer.minibatches
        return _Knob("update", "trainer.microbatch_prompts", trainer.microbatch_prompts, range(1, prompts + 1))
    step = max(1, tokens // _STEPS)  # 1: one response per microbatch
    return _Knob("update", "trainer.microbatch_tokens", tokens, sorted({1, *range(step, tokens, step), tokens}))


def _rollout_knob(config: RunConfig) -> _Knob:
    rollout = config.rollout
    group, limit = rollout.group_size, rollout.batch_responses
    responses = max(rollout.prompts * group, largest_evaluation_batch(config))
    groups = max(1, -(-min(responses, limit or responses) // group))
    return _Knob("rollout", "rollout.batch_responses", limit, range(group, (groups + 1) * group, group))


def _remedy(knob: _Knob, run: MemoryEstimate, config: RunConfig, architecture: Any, room: int) -> str:
    checkpointing: dict[str, Any] = {"model.gradient_checkpointing": True}
    can_checkpoint = knob.phase == "update" and not config.model.gradient_checkpointing
    for changes in ({}, checkpointing) if can_checkpoint else ({},):
        changed = _with(config, changes)
        try:
            need = estimate_memory(changed, architecture) if changes else run
        except NotEstimatedError:  # no layers that can be checkpointed
            continue
        if (value := _largest_that_fits(knob, need, changed, architecture, room)) is not None:
            settings = {knob.key: value, **changes}
            return "it fits with " + " ".join(f"{key}={json.dumps(value)}" for key, value in settings.items())
    also = ", nor is model.gradient_checkpointing=true" if can_checkpoint else ""
    longest = f"rollout.max_new_tokens ({config.rollout.max_new_tokens})"
    return f"no smaller value is enough{also}: lower {longest}, set model.lora.rank, or use a smaller model"


def _largest_that_fits(knob: _Knob, run: MemoryEstimate, config: RunConfig, architecture: Any, room: int) -> int | None:
    """The largest choice that fits; a larger one never needs less."""
    *smaller, own = knob.choices
    if knob.peak(run) <= room:
        return own

    def too_much(value: int) -> bool:
        return knob.peak(estimate_memory(_with(config, {knob.key: value}), architecture)) > room

    fitting = bisect.bisect_left(smaller, True, key=too_much)
    return smaller[fitting - 1] if fitting else None


def _with(config: RunConfig, changes: dict[str, Any]) -> RunConfig:
    for key, value in changes.items():
        section, name = key.split(".")
        config = config.model_copy(update={section: getattr(config, section).model_copy(update={name: value})})
    return config


def device_bytes(device: torch.device) -> int:
    """Total memory of a device; of a CPU, of the machine or its container."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    if device.type == "npu":
        npu: Any = torch.npu  # type: ignore[attr-defined]  # torch_npu puts it there
        return int(npu.get_device_properties(device).total_memory)
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(total, memory_limit() or total)


def process_bytes(device: torch.device) -> int:
    """Memory in use before the run's first tensor."""
    if device.type != "cpu":
        return _CONTEXT
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _least_parameters(architecture: Any) -> int:
    """A lower bound of the parameters: the embedding and the square matrices of the layers."""
    text = architecture.get_text_config()
    hidden, layers = getattr(text, "hidden_size", 0), getattr(text, "num_hidden_layers", 0)
    return int(hidden * (getattr(text, "vocab_size", 0) + 8 * hidden * layers))
