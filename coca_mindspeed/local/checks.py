"""Checks of a local run before its model is loaded: memory and number formats of the device."""

import bisect
import json
import os
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
from coca_mindspeed.local.device import has_bfloat16
from coca_mindspeed.local.memory import MemoryEstimate, NotEstimatedError, estimate_memory
from coca_mindspeed.local.model_files import (
    read_model_config,
)
from coca_mindspeed.local.respond import largest_evaluation_batch
from coca_mindspeed.utils.console import print_text
from coca_mindspeed.utils.limits import memory_limit

_CONTEXT = GIB // 2  # estimated memory of CUDA's or CANN's context before the first tensor
_STEPS = 16  # granularity of the suggested trainer.microbatch_tokens
_SMALL = 20_000_000  # parameters; smaller models are not estimated, so that their runs start at once


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


def check_memory(config: RunConfig, path: Path, device: torch.device, *, show_progress: bool = False) -> None:
    """Refuse a run whose estimate exceeds its device, before its weights are read.

    An architecture that cannot be estimated passes with a warning.
    """
    architecture = read_model_config(path, config.model)
    if _least_parameters(architecture) < _SMALL:
        return
    if show_progress:
        print_text("estimating memory", sys.stderr)
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
