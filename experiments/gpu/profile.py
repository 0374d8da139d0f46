"""Time and memory of one training step: rollout, update, the costliest kernels, and the plan's estimate."""

import time
from contextlib import closing
from pathlib import Path
from typing import Any

import torch

from coca_mindspeed.algorithm.credit import CreditRule
from coca_mindspeed.data.records import read_records
from coca_mindspeed.grading.registry import build_grader
from coca_mindspeed.local.load import load_policy
from coca_mindspeed.local.model_files import read_model_config, weight_shapes
from coca_mindspeed.local.plan import estimate_memory
from coca_mindspeed.local.policy import choose_device
from coca_mindspeed.local.respond import respond
from coca_mindspeed.local.schedule import generator, question_order
from coca_mindspeed.local.update import build_optimizer, update_policy
from coca_mindspeed.scoring.responses import ResponseScorer
from coca_mindspeed.scoring.rollout import confidence_log_probs
from coca_mindspeed.utils.json_files import write_json
from experiments.reproduce.plan import saved_config

_WARM_UP, _STEPS, _KERNELS = 2, 3, 25


def write_profile(run: Path, file: Path) -> None:
    """Profile steps of a finished run's model, and write a JSON file; one that exists is kept.

    ``rollout_seconds`` and ``update_seconds`` have an entry per step, the last of which runs under the profiler.
    ``kernels`` are the operations with the most time of their own on the device, in milliseconds.  ``peak_bytes`` are
    measured and ``estimated_bytes`` by the plan's formula, which leaves out the process and its libraries; on a CPU
    nothing is measured.
    """
    if file.exists():
        return
    config = saved_config(run)
    assert config.data.train is not None
    device = choose_device(config.trainer.device)
    policy = load_policy(run / "model", config.model, device)
    optimizer, rule = build_optimizer(policy, config.optimizer), CreditRule(config.method)
    records = list(read_records(Path(config.data.train)))
    questions = question_order(records, config.rollout.prompts, config.seed)
    seconds: dict[str, list[float]] = {"rollout": [], "update": []}
    peaks: dict[str, int] = {}
    kernels: list[dict[str, Any]] = []
    with closing(build_grader(config.data.grader, config.data.grader_options)) as grader:
        for step in range(_WARM_UP + _STEPS):
            asked = questions.of_step(step)
            draw = generator(device, config.seed, "profile", step)
            group_size = config.rollout.group_size
            started = _start(device)
            rollout = respond(policy, asked, config.method.system_prompt, config.rollout, draw, group_size)
            graded = ResponseScorer(config.method, policy.text, grader)(rollout, asked)
            log_probs = confidence_log_probs(rule, rollout.log_probs, graded.segment_ends)
            credited = graded.give_credit(rule, group_size, log_probs=log_probs)
            seconds["rollout"].append(_seconds_since(started, device))
            peaks["rollout"] = max(peaks.get("rollout", 0), _peak(device))
            started = _start(device)
            if step < _WARM_UP + _STEPS - 1:
                update_policy(policy, rollout, credited, optimizer, config.optimizer.lr, config)
            else:
                with torch.profiler.profile(profile_memory=False) as profiler:
                    update_policy(policy, rollout, credited, optimizer, config.optimizer.lr, config)
                kernels = _costliest(profiler, device)
            seconds["update"].append(_seconds_since(started, device))
            peaks["update"] = max(peaks.get("update", 0), _peak(device))
    shapes = weight_shapes(run / "model")
    estimate = estimate_memory(config, read_model_config(run / "model", config.model), shapes, device)
    measured = device.type != "cpu"
    write_json(
        file,
        {
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else str(device),
            **{f"{part}_seconds": values[_WARM_UP:] for part, values in seconds.items()},
            "kernels": kernels,
            "peak_bytes": peaks if measured else None,
            "estimated_bytes": {"rollout": estimate.rollout, "update": estimate.update},
        },
    )


def _start(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
    return time.perf_counter()


def _seconds_since(started: float, device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started


def _peak(device: torch.device) -> int:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0


def _costliest(profiler: torch.profiler.profile, device: torch.device) -> list[dict[str, Any]]:
    name = "self_device_time_total" if device.type == "cuda" else "self_cpu_time_total"
    events = sorted(profiler.key_averages(), key=lambda event: getattr(event, name), reverse=True)
    return [
        {"name": event.key, "calls": event.count, "milliseconds": getattr(event, name) / 1000}
        for event in events[:_KERNELS]
    ]
