"""Whole training loops compared: ways in turn, a stage's median over the steps of a run, the least of a way's runs."""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.machine import load, machine
from coca_mindspeed.utils.json_files import write_json

WARM_UP_STEPS = 3

Figures = dict[str, float]


def options(description: str, output: Path) -> argparse.Namespace:
    """``model``, ``steps`` (timed ones), ``rounds`` and ``output`` of the command line."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("model", type=Path, help="a warmed-up tiny model, such as runs/demo/warm_start")
    parser.add_argument("--steps", type=int, default=20, help="timed steps of each run (default: 20)")
    parser.add_argument("--rounds", type=int, default=2, help="runs of each (default: 2)")
    parser.add_argument("--output", type=Path, default=output, help=f"default: {output}")
    arguments = parser.parse_args()
    if arguments.steps < 2:
        parser.error(f"--steps: expected 2 or more, found {arguments.steps}")  # processor time is between two of them
    return arguments


def in_turn(ways: Mapping[str, Callable[[int], Figures]], rounds: int, output: Path) -> dict[str, Figures]:
    """Measure every way ``rounds`` times, in turn; keep all of it as JSON, with the machine's load behind each run.

    Args:
        ways: from the number of the round to its figures.
        rounds: how many.
        output: of the JSON.

    Returns:
        the least of each figure over a way's rounds.
    """
    runs: dict[str, list[Figures]] = {name: [] for name in ways}
    loads: dict[str, list[float | None]] = {name: [] for name in ways}
    for number in range(rounds):
        for name, measure in ways.items():
            runs[name].append(measure(number))
            loads[name].append(load())
            print(f"{name}, under a load of {loads[name][-1]}: {json.dumps(runs[name][-1])}", flush=True)
    least = {name: {key: min(run[key] for run in each) for key in each[0]} for name, each in runs.items()}
    write_json(output, {"machine": machine(), "runs": runs, "loads": loads, "least": least})
    return least


def in_a_process(module: str, *options: str) -> Figures:
    """What a benchmark prints as JSON on its last line, run with these options in a process that does nothing else."""
    run = subprocess.run([sys.executable, "-m", module, *options], stdout=subprocess.PIPE, text=True, check=True)
    figures: Figures = json.loads(run.stdout.splitlines()[-1])
    return figures


def medians(steps: Sequence[Mapping[str, Any]], keys: Sequence[str]) -> Figures:
    """Of each of the keys, over the steps behind the warm-up."""
    return {key: median(float(step[key]) for step in steps[WARM_UP_STEPS:]) for key in keys}


def processor_seconds_a_step(
    seconds: Callable[[], float], done: Callable[[], int], running: Callable[[], bool], steps: int
) -> float:
    """Of all processes of a run, averaged from behind the warm-up to the last step but one; returns then.

    Args:
        seconds: used so far.
        done: steps so far.
        running: whether the run still runs; one that ended before has no such figure.
        steps: of the run.
    """
    marks = []
    for reached in (WARM_UP_STEPS, steps - 1):
        while running() and done() < reached:
            time.sleep(0.02)
        marks.append(seconds())
    return (marks[1] - marks[0]) / (steps - 1 - WARM_UP_STEPS)


def table(least: Mapping[str, Figures], ours: str) -> list[str]:
    """A Markdown table: a figure a row, a way a column, and what ours is divided by each of the others."""
    others = [name for name in least if name != ours]
    columns = ["", *least, *(f"{ours} / {name}" for name in others)]
    lines = [f"| {' | '.join(columns)} |", "|---|" + "---:|" * (len(columns) - 1)]
    fullest_first = sorted(least.values(), key=len, reverse=True)
    for key in dict.fromkeys(key for figures in fullest_first for key in figures):
        values = {name: figures.get(key) for name, figures in least.items()}
        cells = ["" if value is None else f"{value:.3f}" for value in values.values()]
        cells += [_ratio(values[ours], values[name]) for name in others]
        lines.append(f"| {' | '.join([key, *cells])} |")
    return lines


def _ratio(ours: float | None, other: float | None) -> str:
    return f"{ours / other:.2f}" if ours is not None and other else ""
