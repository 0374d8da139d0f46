"""Whether a run fits into the memory of its device, and if it does not, which setting makes it fit."""

import bisect
import json
import os
import resource
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from coca_mindspeed.config.model_size import GIB
from coca_mindspeed.config.schema import RunConfig
from coca_mindspeed.errors import ConfigError
from coca_mindspeed.local.experience import largest_evaluation_batch
from coca_mindspeed.local.memory import MemoryEstimate, NotEstimatedError, estimate_memory
from coca_mindspeed.local.model_files import read_model_config
from coca_mindspeed.utils.console import print_text

_CONTEXT = GIB // 2  # what CUDA's or CANN's context takes before the first tensor, by estimate
_PARTS = 16  # of a run's trainer.microbatch_tokens: how near the value is that would fit
_SMALL = 20_000_000  # parameters; a smaller model is not near any machine's memory, and its run starts at once


@dataclass(frozen=True)
class MemoryCheck:
    """What a run needs beside what there is, in bytes.

    Attributes:
        run: what the run's tensors need.
        process: what Python and the libraries take.
        device: the device's memory.
    """

    run: MemoryEstimate
    process: int
    device: int


def check_memory(config: RunConfig, architecture: Any, device: torch.device) -> MemoryCheck:
    """Compare a run's estimate with its device, busy or not: what others hold there is not counted.

    Raises:
        NotEstimatedError: the model is of an architecture that cannot be estimated.
    """
    return MemoryCheck(estimate_memory(config, architecture), process_bytes(device), device_bytes(device))


def refuse_what_cannot_fit(config: RunConfig, path: Path, device: torch.device) -> None:
    """Refuse a run before its weights are read, where its estimate is more than the whole memory of its device.

    An architecture that cannot be estimated is let through with a warning.

    Raises:
        ConfigError: it names the key, its value and the nearest value that fits.
    """
    architecture = read_model_config(path, config.model)
    if _parameters_at_least(architecture) < _SMALL:
        return
    try:
        check = check_memory(config, architecture, device)
    except NotEstimatedError as error:
        print_text(f"warning: {error}", sys.stderr)
        return
    if problems := memory_problems(check, config, architecture):
        raise ConfigError("\n".join(problems))


def memory_problems(check: MemoryCheck, config: RunConfig, architecture: Any) -> list[str]:
    """Each phase that does not fit, with the key, its value and the nearest value that does; none: it fits."""
    room = check.device - check.process
    problems = [
        f"{knob.key}={json.dumps(knob.value)}: the {knob.phase} needs {knob.peak(check.run) / GIB:.1f} GiB, and the "
        f"device has {room / GIB:.1f} beside the process; {_remedy(knob, check.run, config, architecture, room)}"
        for knob in _knobs(config)
        if knob.peak(check.run) > room
    ]
    if check.run.merged and check.run.export_peak > room:
        problems.append(
            f"model.lora.rank={config.model.lora.rank}: merging the adapters at the end needs "
            f"{check.run.export_peak / GIB:.1f} GiB, and the machine has {room / GIB:.1f} beside the process; take "
            "one with more memory, or a smaller model"
        )
    return problems


@dataclass(frozen=True)
class _Knob:
    """A setting that decides how much a phase holds at a time.

    Attributes:
        phase: update or rollout.
        key: of the setting.
        value: that it has.
        choices: values from the least to the one that holds as much as the run does now.
    """

    phase: Literal["update", "rollout"]
    key: str
    value: int | None
    choices: Sequence[int]

    def peak(self, run: MemoryEstimate) -> int:
        """Bytes of the phase."""
        return run.update_peak if self.phase == "update" else run.rollout_peak


def _knobs(config: RunConfig) -> list[_Knob]:
    """The clock that decides about each phase."""
    return [_update_knob(config), _rollout_knob(config)]


def _update_knob(config: RunConfig) -> _Knob:
    trainer, rollout = config.trainer, config.rollout
    if trainer.microbatch_tokens is None:
        prompts = trainer.microbatch_prompts or rollout.prompts // trainer.minibatches
        return _Knob("update", "trainer.microbatch_prompts", trainer.microbatch_prompts, range(1, prompts + 1))
    tokens = trainer.microbatch_tokens
    step = max(1, tokens // _PARTS)
    choices = sorted({1, *range(step, tokens, step), tokens})  # 1: a response a pass
    return _Knob("update", "trainer.microbatch_tokens", tokens, choices)


def _rollout_knob(config: RunConfig) -> _Knob:
    rollout = config.rollout
    responses = max(rollout.prompts * rollout.group_size, largest_evaluation_batch(config))
    if rollout.batch_responses is not None:
        responses = min(responses, rollout.batch_responses)
    groups = max(1, -(-responses // rollout.group_size))
    choices = range(rollout.group_size, (groups + 1) * rollout.group_size, rollout.group_size)
    return _Knob("rollout", "rollout.batch_responses", rollout.batch_responses, choices)


def _remedy(knob: _Knob, run: MemoryEstimate, config: RunConfig, architecture: Any, room: int) -> str:
    recomputing = "model.gradient_checkpointing"
    tries: list[dict[str, Any]] = [{}]
    if knob.phase == "update" and not config.model.gradient_checkpointing:
        tries.append({recomputing: True})
    for changes in tries:
        changed = _with(config, changes)
        try:
            need = estimate_memory(changed, architecture) if changes else run
        except NotEstimatedError:  # no layers that can be recomputed
            continue
        value = _largest_that_fits(knob, need, changed, architecture, room)
        if value is not None:
            settings = {knob.key: value, **changes}
            return "it fits with " + " ".join(f"{key}={json.dumps(value)}" for key, value in settings.items())
    return (
        f"no smaller value is enough{f', nor is {recomputing}=true' * (len(tries) > 1)}: lower "
        f"rollout.max_new_tokens ({config.rollout.max_new_tokens}), set model.lora.rank, or take a smaller model"
    )


def _largest_that_fits(knob: _Knob, run: MemoryEstimate, config: RunConfig, architecture: Any, room: int) -> int | None:
    """The nearest of the choices; a larger one never needs less."""
    *smaller, own = knob.choices
    if knob.peak(run) <= room:
        return own

    def too_much(value: int) -> bool:
        return knob.peak(estimate_memory(_with(config, {knob.key: value}), architecture)) > room

    fitting = bisect.bisect_left(smaller, True, key=too_much)
    return smaller[fitting - 1] if fitting else None


def _with(config: RunConfig, changes: Mapping[str, Any]) -> RunConfig:
    for key, value in changes.items():
        section, name = key.split(".")
        config = config.model_copy(update={section: getattr(config, section).model_copy(update={name: value})})
    return config


def device_bytes(device: torch.device) -> int:
    """The whole memory of a device; of a CPU, the machine's or what its container may have."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    if device.type == "npu":
        npu: Any = torch.npu  # type: ignore[attr-defined]  # torch_npu puts it there
        return int(npu.get_device_properties(device).total_memory)
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii").strip()
    except OSError:
        return total
    return min(total, int(limit)) if limit.isdecimal() else total


def process_bytes(device: torch.device) -> int:
    """What is taken before the run's first tensor."""
    if device.type != "cpu":
        return _CONTEXT
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _parameters_at_least(architecture: Any) -> int:
    """Parameters of the embedding and of the layers' square matrices, from below, by the configuration alone."""
    text = architecture.get_text_config()
    hidden, layers = getattr(text, "hidden_size", 0), getattr(text, "num_hidden_layers", 0)
    return int(hidden * (getattr(text, "vocab_size", 0) + 8 * hidden * layers))
