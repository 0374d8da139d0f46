"""What the comparisons of a training step with TRL's share: options, processes of their own, and how steps are timed.

TRL wants another transformers than MindSpeed-RL does; ``make bench-trl`` makes the environment that they need.
"""

import argparse
import json
import resource
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.loops_in_turn import in_a_process, in_turn, table
from benchmarks.our_step import OurStep

#: TRL's settings by which it trains as our step does, on a CPU, and writes nothing.
AS_OURS: dict[str, Any] = {
    "temperature": 1.0,
    "top_k": 0,
    "beta": 0.0,
    "epsilon": 0.2,
    "max_grad_norm": 1.0,
    "bf16": False,
    "gradient_checkpointing": False,
    "use_cpu": True,
    "report_to": [],
    "save_strategy": "no",
    "logging_steps": 10_000,
    "disable_tqdm": True,
}


def options(description: str | None, ways: Sequence[str], steps: int, output: Path) -> argparse.ArgumentParser:
    """``--steps`` (timed ones), ``--rounds``, ``--threads``, ``--output`` and ``--way``."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--steps", type=int, default=steps, help="timed steps of a run (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=2, help="runs of each way (default: 2)")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default: 2)")
    parser.add_argument("--output", type=Path, default=output, help=f"default: {output}")
    parser.add_argument("--way", choices=ways, help="measure this one alone, and print its figures as JSON")
    return parser


def compare(module: str, ways: Sequence[str], arguments: argparse.Namespace, *others: str) -> None:
    """Run a module's ways in turn, each in processes of its own, and print the table; the first way is ours.

    Args:
        module: takes :func:`options`.
        ways: its ways.
        arguments: as they were given to it.
        others: further words of its command line.
    """
    given = [f"--steps={arguments.steps}", f"--threads={arguments.threads}", *others]
    runs = {way: lambda _, way=way: in_a_process(module, *given, f"--way={way}") for way in ways}
    print("\n".join(table(in_turn(runs, arguments.rounds, arguments.output), ways[0])))


def print_figures(measure: Callable[[int], list[float]], arguments: argparse.Namespace, warm_up: int) -> None:
    """Print as JSON the median seconds of a step behind the warm-up, and the process's peak of memory in GiB.

    Args:
        measure: from how many steps there are to the seconds of each.
        arguments: of :func:`options`.
        warm_up: steps that do not count.
    """
    torch.set_num_threads(arguments.threads)
    seconds = measure(arguments.steps + warm_up)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({"step": statistics.median(seconds[warm_up:]), "peak, GiB": peak / 2**30}))


def seconds_of_ours(step: OurStep, steps: int) -> list[float]:
    """Seconds of each of our steps."""
    seconds = []
    for _ in range(steps):
        started = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - started)
    return seconds


def seconds_of_trls(trainer: Any, updates: int) -> list[float]:
    """Seconds of each of TRL's cycles of one rollout and so many updates, until its training ends.

    Args:
        trainer: a GRPOTrainer.
        updates: of a rollout.
    """
    from transformers import TrainerCallback  # here, because ours would have its memory too

    class Timer(TrainerCallback):  # type: ignore[misc]
        def __init__(self) -> None:
            self.seconds: list[float] = []
            self._started = 0.0

        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self._started = time.perf_counter()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step % updates == 0:
                now = time.perf_counter()
                self.seconds.append(now - self._started)
                self._started = now

    timer = Timer()
    trainer.add_callback(timer)
    trainer.train()
    return timer.seconds
