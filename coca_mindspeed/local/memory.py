"""Memory of a run: an estimate by formula, and the peak that a child process measures.

The child runs a quarter and half of the size, and the peak is extrapolated: at full size the kernel would kill it.
The run's random state is not touched.
"""

import json
import math
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch

from coca_mindspeed.config.schema import RunConfig
from coca_mindspeed.errors import Problem, raise_problems
from coca_mindspeed.local.load import load_policy, sharing_of
from coca_mindspeed.local.lora import add_adapters, dtype_of_weights
from coca_mindspeed.local.model_files import Shapes, read_model_config, trained_bytes, weight_shapes
from coca_mindspeed.local.policy import Policy, choose_device, is_out_of_memory
from coca_mindspeed.local.respond import largest_evaluation_batch
from coca_mindspeed.local.sampler import Decoder, StaticSampler, draw, sample_responses
from coca_mindspeed.local.static_decoder import StaticDecoder, decodes_statically, prefilled
from coca_mindspeed.local.update import ResponseBatch, build_optimizer, largest_group_sizes
from coca_mindspeed.utils.console import print_text
from coca_mindspeed.utils.process import GIB, memory_limit
from coca_mindspeed.utils.progress import StepProgress

# Fitted (docs/training.md): numbers that a layer keeps per token, in widths of it and of its MLP; bytes of the LM head.
_OF_HIDDEN, _OF_MLP, _LM_HEAD = 11, 4, 6 * 2**25


class Batch(NamedTuple):
    """Prompts of ``prompt`` tokens, and ``rows`` responses of ``response`` tokens to them."""

    prompts: int
    rows: int
    prompt: int
    response: int


class MemoryEstimate(NamedTuple):
    """Bytes that a run needs besides the process and its libraries, in float32."""

    weights: int
    moments: int
    logits: int
    gradients: int
    activations: int
    cache: int

    @property
    def peak(self) -> int:
        return self.weights + self.moments + self.logits + max(self.gradients + self.activations, self.cache)


def largest_microbatch(config: RunConfig) -> Batch:
    """The microbatch of the longest prompts and responses."""
    rollout, prompt, response = config.rollout, config.rollout.max_prompt_tokens, config.rollout.max_new_tokens
    prompts = rollout.prompts // config.trainer.minibatches
    sizes = largest_group_sizes(prompts, rollout.group_size, response, prompt, config.trainer)
    return Batch(len(sizes), sum(sizes), prompt, response)


def largest_sample(config: RunConfig) -> Batch:
    """The most and longest responses that a step or an evaluation samples at once."""
    rollout, questions = config.rollout, largest_evaluation_batch(config)
    rows, lengths = rollout.prompts * rollout.group_size, (rollout.max_prompt_tokens, rollout.max_new_tokens)
    prompts = min(rows, rollout.batch_responses or rows) // rollout.group_size or 1
    batches = Batch(prompts, prompts * rollout.group_size, *lengths), Batch(questions, questions, *lengths)
    return max(batches, key=lambda batch: (batch.rows, batch.prompts))


def estimate_memory(config: RunConfig, architecture: Any, shapes: Shapes) -> MemoryEstimate:
    """Estimate from the model's Hugging Face configuration and the shapes of its weights (empty: it has none yet)."""
    lora, batch, sample = config.model.lora, largest_microbatch(config), largest_sample(config)
    hidden, layers, heads = architecture.hidden_size, architecture.num_hidden_layers, architecture.num_attention_heads
    head = getattr(architecture, "head_dim", None) or hidden // heads
    keys = 2 * head * (getattr(architecture, "num_key_value_heads", None) or heads)  # and values
    mlp = getattr(architecture, "intermediate_size", None) or 4 * hidden
    if not shapes:  # a dense decoder with a gated MLP
        numbers = hidden * (2 * head * heads + keys + 3 * mlp * (getattr(architecture, "num_experts", None) or 1))
        embeddings = (2 - architecture.tie_word_embeddings) * architecture.vocab_size * hidden
        shapes = {"embedding": [embeddings], "layers": [layers * numbers]}
    gradients, moments = trained_bytes(shapes, lora, config.optimizer.name)
    frozen, adapters = (4, 0) if lora.rank is None else (2 if lora.base_dtype == "bfloat16" else 4, gradients)
    tokens = batch.rows * batch.response
    tokens += batch.prompt * (batch.prompts if config.trainer.share_prompts else batch.rows)
    layer = 4 * tokens * (_OF_HIDDEN * hidden + _OF_MLP * mlp)
    logits = min(_LM_HEAD, 24 * architecture.vocab_size * max(batch.rows * batch.response, sample.rows))
    return MemoryEstimate(
        weights=frozen * sum(map(math.prod, shapes.values())) + adapters,
        moments=moments,
        logits=max(logits, layer) if config.model.gradient_checkpointing else logits,  # or one layer that runs again
        gradients=gradients,
        activations=layers * (4 * tokens * (hidden + keys) if config.model.gradient_checkpointing else layer),
        cache=4 * layers * keys * sample.rows * (sample.prompt + sample.response),
    )


_CONTEXT = GIB // 2  # estimated memory of CUDA's or CANN's context
_MEASURED_SHARE = 0.25  # of the free memory; runs with a smaller estimate start at once
_SHARES = (0.25, 0.5)
_KILLED = (-signal.SIGKILL, 128 + signal.SIGKILL)
# glibc returns freed memory at once, so that the peak of an earlier pass is not measured again.
_ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0"}


def check_memory(config: RunConfig, device: torch.device, *, show_progress: bool = False) -> None:
    """Refuse a run of ``model.path`` that exceeds the free memory; one with a small estimate is not measured."""
    path, room = Path(str(config.model.path)), free_bytes(device)
    architecture, shapes = read_model_config(path, config.model), weight_shapes(path)
    need = estimate_memory(config, architecture, shapes)
    if (least := need.weights + need.moments + need.gradients) > room:
        reason = f"weights, gradients and moments need {least / GIB:.1f} GiB, and {room / GIB:.1f} GiB are free"
        fix = "set model.lora.rank or optimizer.name=adamw_8bit, or use a smaller model"
        raise_problems([Problem("memory-weights", "model.path", config.model.path, reason, fix)])
    if not shapes or need.peak <= _MEASURED_SHARE * room:
        return
    eager = config.model.attention == "eager" or sharing_of(architecture, config.model) == "none"
    raise_problems(memory_problems(config, measure(config, show_progress), room, eager=eager))


def memory_problems(
    config: RunConfig, peaks: Mapping[str, Sequence[int]], room: int, *, eager: bool = False
) -> list[Problem]:
    """A problem for each phase whose peak at full size exceeds ``room``, with the key to lower.

    ``peaks`` holds the bytes at each of the shares, fewer if memory was exhausted.  Lengths are scaled, so a peak grows
    linearly, with ``eager`` attention up to quadratically.
    """
    problems: list[Problem] = []
    for phase, measured in peaks.items():
        if len(measured) < len(_SHARES):
            share = _SHARES[len(measured)]
            reason = f"the {phase} ran out of the {room / GIB:.1f} GiB that are free, at {share:g} of its size"
            return [*problems, _problem(config, phase, reason)]
        quarter, half = measured
        full = half + (4 if eager else 2) * max(0, half - quarter)
        if full > room:
            reason = (
                f"the {phase} needs about {full / GIB:.1f} GiB, and {room / GIB:.1f} are free (measured at a quarter "
                f"and half of its size: {quarter / GIB:.1f} and {half / GIB:.1f})"
            )
            problems.append(_problem(config, phase, reason))
    return problems


def _problem(config: RunConfig, phase: str, reason: str) -> Problem:
    """Name the key that bounds the memory of a phase, and its present size."""
    trainer, rollout, batch = config.trainer, config.rollout, largest_microbatch(config)
    if phase == "rollout":
        key, value, size = "rollout.batch_responses", rollout.batch_responses, largest_sample(config).rows
    elif trainer.microbatch_tokens is not None:
        key, value, size = "trainer.microbatch_tokens", trainer.microbatch_tokens, trainer.microbatch_tokens
    else:
        key, value, size = "trainer.microbatch_prompts", trainer.microbatch_prompts, batch.prompts
    fix = f"set {key} below {size}, lower rollout.max_new_tokens, set model.lora.rank, or use a smaller model"
    if phase == "update" and not config.model.gradient_checkpointing:
        fix = f"set model.gradient_checkpointing=true, or {fix}"
    return Problem(f"memory-{phase}", key, value, reason, fix)


def measure(config: RunConfig, show_progress: bool) -> dict[str, list[int]]:
    """Peaks of update and rollout at each share, by a child process; empty, with a warning, if it cannot measure.

    A list ends early if the child ran out of memory.
    """
    peaks: dict[str, list[int]] = {}
    request = {"config": config.model_dump(mode="json"), "batches": _batches(config)}
    command = [sys.executable, "-m", "coca_mindspeed.local.memory"]
    total = len(_SHARES) * len(request["batches"])
    with (
        tempfile.TemporaryFile("w+") as errors,
        StepProgress(total, show_progress, title="measuring memory") as progress,
        subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env={**os.environ, **_ALLOCATOR},
        ) as child,
    ):
        assert child.stdin is not None
        assert child.stdout is not None
        with suppress(BrokenPipeError), child.stdin:  # of a child that fails at once
            json.dump(request, child.stdin)
        for line in child.stdout:
            phase, peak = json.loads(line)
            peaks.setdefault(phase, [])
            if peak is not None:
                peaks[phase].append(peak)
            progress.show(sum(map(len, peaks.values())))
        if child.wait() not in (0, *_KILLED):
            errors.seek(0)
            reason = (errors.read().strip().splitlines() or [f"exit code {child.returncode}"])[-1]
            print_text(f"warning: the memory of the run was not measured: {reason}", sys.stderr)
            return {}
    return peaks


def _batches(config: RunConfig) -> dict[str, Batch]:
    return {"update": largest_microbatch(config), "rollout": largest_sample(config)}


# ---- the child process


def main() -> None:
    request = json.load(sys.stdin)
    config = RunConfig.model_validate(request["config"])
    if config.trainer.threads is not None:
        torch.set_num_threads(config.trainer.threads)
    device = choose_device(config.trainer.device)
    with suppress(OSError):  # Linux: the kernel kills this process first
        Path("/proc/self/oom_score_adj").write_text("1000")
    try:
        _run_parts(config, device, {phase: Batch(*batch) for phase, batch in request["batches"].items()})
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        sys.exit(_KILLED[-1])


def _run_parts(config: RunConfig, device: torch.device, batches: Mapping[str, Batch]) -> None:
    """Print each phase (with null), and its peaks, one JSON line each."""
    print(json.dumps(["update", None]), flush=True)  # loading counts as part of it
    lora = config.model.lora
    policy = load_policy(Path(str(config.model.path)), config.model, device, dtype=dtype_of_weights(lora))
    add_adapters(policy, lora, seed=0)
    optimizer = build_optimizer(policy, config.optimizer)
    small = Batch(1, 1, 2, 2)
    run_update(policy, config, small, small)
    optimizer.step()  # gradients and moments are there from now on
    for phase, whole in batches.items():
        print(json.dumps([phase, None]), flush=True)
        for share in _SHARES:
            prompt, response = (max(2, round(share * length)) for length in (whole.prompt, whole.response))
            batch = whole._replace(prompt=prompt, response=response)
            reset_peak(device)
            if phase == "update":
                run_update(policy, config, batch, whole)
                optimizer.step()
            else:
                run_rollout(policy, config, batch)
            print(json.dumps([phase, peak_bytes(device)]), flush=True)
        optimizer.zero_grad(set_to_none=True)


class _ByChunks(ResponseBatch):
    """A part of a microbatch that is too large for one chunk of logits."""

    @property
    def _fits_one_chunk(self) -> bool:
        return False


def run_update(policy: Policy, config: RunConfig, batch: Batch, whole: Batch) -> None:
    """Run a part of the ``whole`` microbatch forwards and backwards."""
    rows, more = divmod(batch.rows, batch.prompts)
    one_chunk = policy.lm_head.fits_one_chunk(whole.rows * whole.response)
    responses = (ResponseBatch if one_chunk else _ByChunks)(
        policy,
        _prompts(batch),
        torch.ones(batch.rows, batch.response, dtype=torch.long, device=policy.device),
        temperature=config.rollout.temperature,
        share_prompts=config.trainer.share_prompts,
        group_sizes=[rows + (n < more) for n in range(batch.prompts)],
    )
    responses.backward(lambda log_probs: log_probs.sum())


def run_rollout(policy: Policy, config: RunConfig, batch: Batch) -> None:
    """Sample one batch; run only the decoding steps that grow the cache."""
    temperature, last = config.rollout.temperature, batch.prompt + batch.response - 1
    prompts, group_size = _prompts(batch), batch.rows // batch.prompts
    if decodes_statically(policy):
        with torch.inference_mode(), policy.autocast():
            cache, _ = prefilled(policy, prompts)
            policy.static = StaticSampler(policy, StaticDecoder(policy, cache, batch.rows, last + 1))
        sample_responses(  # a few tokens, in the buffers of all
            policy,
            prompts,
            group_size=group_size,
            max_new_tokens=min(3, batch.response),
            temperature=temperature,
            generator=torch.Generator(policy.device),
        )
        return
    with torch.inference_mode(), policy.autocast():
        decoder = Decoder(policy, prompts, batch.response)
        row_of = torch.arange(batch.prompts, device=policy.device).repeat_interleave(group_size)
        draw(policy, decoder.logits, temperature, row_of=row_of)
        decoder.keep(row_of)  # no response shares a row
        token = torch.ones(len(row_of), 1, dtype=torch.long, device=policy.device)
        while decoder.width < last:
            decoder.skip_to(last - 1)
            decoder.step(token)
            draw(policy, decoder.logits, temperature)


def _prompts(batch: Batch) -> list[list[int]]:
    """Prompts without a common prefix; the first one is shorter, so that padding is needed."""
    shorter = batch.prompts > 1
    return [[int(n > 0)] * (batch.prompt - (n == 0 and shorter)) for n in range(batch.prompts)]


def reset_peak(device: torch.device) -> None:
    if device.type == "cpu":
        Path("/proc/self/clear_refs").write_text("5")
    else:
        getattr(torch, device.type).reset_peak_memory_stats()


def peak_bytes(device: torch.device) -> int:
    """Peak since :func:`reset_peak`: resident memory of the process, or memory allocated on a GPU or NPU."""
    if device.type == "cpu":
        return _kib("/proc/self/status", "VmHWM")
    return int(getattr(torch, device.type).max_memory_allocated()) + _CONTEXT


def free_bytes(device: torch.device) -> int:
    """Memory that the run can take, this process's own included."""
    if device.type != "cpu":
        return int(getattr(torch, device.type).mem_get_info()[0])
    try:
        free = _kib("/proc/meminfo", "MemAvailable") + _kib("/proc/self/status", "VmRSS")
    except OSError:  # not Linux
        free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(free, memory_limit() or free)


def _kib(file: str, name: str) -> int:
    """A size in a file of /proc, in bytes."""
    return 1024 * int(Path(file).read_text(encoding="ascii").partition(f"{name}:")[2].split()[0])


if __name__ == "__main__":
    main()
