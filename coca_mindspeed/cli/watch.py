"""``coca-mindspeed watch``: a running training in the terminal, until it ends; once, if the output is a file."""

import argparse
import json
import math
import re
import shlex
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from coca_mindspeed.cli.options import above
from coca_mindspeed.config.compose import validate_config
from coca_mindspeed.errors import ConfigError, DataError
from coca_mindspeed.evaluation.metrics import METRIC_SPECS, UNDEFINED, bin_table, calibration_metrics, show
from coca_mindspeed.scoring.health import NO_SIGNAL_STEPS, gap_problem, health_problems, rewards_confidence
from coca_mindspeed.scoring.metrics import CONFIDENCE_REWARD
from coca_mindspeed.utils.console import duration, terminal_text
from coca_mindspeed.utils.custom_code import is_custom
from coca_mindspeed.utils.directories import LOCK, PROGRESS, is_ours, is_running
from coca_mindspeed.utils.json_files import read_complete_rows, read_json_lines
from coca_mindspeed.utils.progress import Pace
from coca_mindspeed.utils.text_formats import YamlError, read_yaml

_BLOCKS = "▁▂▃▄▅▆▇█"
_WIDTH = 30
_SCALARS: tuple[tuple[str, str], ...] = (
    (CONFIDENCE_REWARD, "confidence reward"),
    ("reward/answer", "answer reward"),
    ("rollout/ece", "ECE, rollout"),
    ("rollout/auroc", "AUROC, rollout"),
    ("rollout/brier", "Brier, rollout"),
    ("response/length", "response length"),
    ("eval/accuracy", "accuracy, held out"),
    ("eval/ece", "ECE, held out"),
    ("eval/auroc", "AUROC, held out"),
    ("eval/success_rate", "success rate, held out"),
    ("eval/tokens_to_confidence", "tokens to confidence"),
)
_GO_ON = "no process trains it; its command with --resume continues it"
_SAMPLE_FILES = 20  # newest files of rollout samples behind the reliability table; each holds few answers


def _is_run(path: Path) -> bool:
    """Whether a run of any engine has begun here."""
    return is_ours(path, "run") or (path / "metrics.jsonl").exists()


def _rows(path: Path) -> list[dict[str, Any]]:
    """The complete rows of metrics.jsonl or timing.jsonl."""
    return [row for _, row in read_complete_rows(path)] if path.exists() else []


def _left(seconds: float | None) -> str:
    return "" if seconds is None else f", about {duration(seconds)} left"


def sparkline(values: Sequence[float], width: int = _WIDTH) -> str:
    """Draw a metric over time in ``width`` characters, each the mean of its part of the values."""
    known = np.array([value for value in values if not math.isnan(value)])
    if not len(known):
        return ""
    means = np.array([part.mean() for part in np.array_split(known, min(width, len(known)))])
    low, high = means.min(), means.max()
    level = np.zeros(len(means)) if high == low else (means - low) / (high - low)
    return "".join(_BLOCKS[round(x * (len(_BLOCKS) - 1))] for x in level)


def _scalars(rows: Sequence[Mapping[str, Any]], hidden: Collection[str]) -> Table:
    table = Table("metric", "first", "last", "course", box=None, padding=(0, 1))
    for key, label in (pair for pair in _SCALARS if pair[0] not in hidden):
        if values := [math.nan if row[key] is None else float(row[key]) for row in rows if key in row]:
            ends = [UNDEFINED if math.isnan(value) else f"{value:.3f}" for value in (values[0], values[-1])]
            table.add_row(label, *ends, sparkline(values))
    return table


def _reliability(samples: Sequence[Mapping[str, Any]]) -> RenderableType:
    usable = [row for row in samples if isinstance(row.get("correct"), bool) and "confidence" in row]
    if not usable:
        return Text("no rollout samples yet")
    confidence = np.array([row["confidence"] for row in usable], dtype=np.float64)  # None becomes NaN
    correct = np.array([row["correct"] for row in usable])
    bins, metrics = bin_table(confidence, correct), calibration_metrics(confidence, correct)
    table = Table("confidence", "answers", "stated", "correct", "fraction correct", box=None, padding=(0, 1))
    for i, count in enumerate(bins.count):
        numbers = [f"{x:.2f}" if count else UNDEFINED for x in (bins.confidence[i], bins.accuracy[i])]
        bar = "█" * round(_WIDTH * float(bins.accuracy[i])) if count else ""
        table.add_row(f"{bins.edges[i]:.1f}-{bins.edges[i + 1]:.1f}", str(count), *numbers, bar)
    shown = [f"{METRIC_SPECS[name].label} {show(name, metrics.values[name])}" for name in ("ece", "auroc", "brier")]
    return Group(table, Text(f"{metrics.n_valid} of {metrics.n} answers state a confidence; {', '.join(shown)}"))


def dashboard(path: Path) -> tuple[RenderableType, bool]:
    """Return the state of the run in ``path``, for rich to print, and whether the run has ended."""
    stopped = is_running(path) is False
    rows = _rows(path / "metrics.jsonl")
    if not rows:
        text = f"stopped before its first step; {_GO_ON}" if stopped else "waiting for the first step"
        with suppress(OSError, ValueError):  # no phase before it has written anything, or half of it
            state = json.loads((path / PROGRESS).read_text(encoding="utf-8"))
            left = f"; {text}" if stopped else _left(state["left"])
            text = f"{state['title']} {state['step']}/{state['total']}{left}"
        return Panel(Text(text), title=terminal_text(str(path))), stopped
    step, progress, finished = rows[-1].get("step", "?"), "", False
    config = None
    with suppress(OSError, YamlError, ConfigError, TypeError, AttributeError):  # not a run of this release
        config = validate_config(read_yaml(path / "config.yaml"), path / "config.yaml")
    method = None
    if config is not None and isinstance(step, int) and not is_custom(config.method.name):  # whose code is not run
        method, total = config.method.training_method, config.total_steps
        finished = step == total
        pace = Pace(total, config.evaluation.interval, _rows(path / "timing.jsonl"))
        progress = f" of {total}{_left(pace.left(step) if step < total and not stopped else None)}"
    hidden = () if rewards_confidence(method) else (CONFIDENCE_REWARD,)
    parts: list[RenderableType] = []
    if stopped and not finished:
        parts.append(Text(f"stopped after step {step}; {_GO_ON}"))
    problems = {**health_problems(rows[-NO_SIGNAL_STEPS:], method), **gap_problem(rows)}
    if len(rows) >= NO_SIGNAL_STEPS and problems:
        text = "\n".join(f"warning: {text}" for text in problems.values())
        parts.append(Text(f"{text}\nsee docs/troubleshooting.md", style="bold red"))
    samples = sorted((path / "samples").glob("*.jsonl"))[-_SAMPLE_FILES:]
    answers = [row for file in samples for _, row in read_json_lines(file)]
    parts.append(Panel(_scalars(rows, hidden), title=terminal_text(f"{path.name}, step {step}{progress}")))
    parts.append(Panel(_reliability(answers), title=f"Reliability of rollout samples{_steps_of(samples)}"))
    return Group(*parts), finished or stopped


def _steps_of(files: Sequence[Path]) -> str:
    """Steps of the first and last files of samples; those of the local engine are not of every step."""
    found = [re.search(r"\d+$", file.stem) for file in (*files[:1], *files[-1:])]
    steps = dict.fromkeys(int(number[0]) for number in found if number)
    return f", step{'s' * (len(steps) > 1)} {' to '.join(map(str, steps))}" if steps else ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", type=Path, metavar="DIR", help="a run's directory, which holds metrics.jsonl")
    parser.add_argument("--interval", type=above(0), default=2.0, help="seconds between updates (default: %(default)s)")
    parser.add_argument("--once", action="store_true", help="print once and stop, as into a file")


def run(arguments: argparse.Namespace) -> int:
    if not arguments.directory.is_dir():
        raise DataError(f"{arguments.directory}: is not a directory; expected the --output directory of a training")
    _require_run(arguments.directory)
    view, finished = dashboard(arguments.directory)
    if arguments.once or finished or not sys.stdout.isatty():
        Console(file=sys.stdout).print(view)
        return 0
    with suppress(KeyboardInterrupt), Live(view, auto_refresh=False) as live:
        while not finished:
            time.sleep(max(0.1, arguments.interval))
            view, finished = dashboard(arguments.directory)
            live.update(view, refresh=True)
    return 0


def _require_run(path: Path) -> None:
    """Raise DataError if no run has begun or is about to begin in the directory; names the runs below it."""
    if _is_run(path):
        return
    below = [each for pattern in ("*/", "*/*/") for each in path.glob(pattern) if _is_run(each)]
    if runs := sorted(below, key=lambda run: run.stat().st_mtime, reverse=True):
        lines = [f"    coca-mindspeed watch {shlex.quote(str(run))}" for run in runs]
        raise DataError("\n".join([f"{path}: is not a run; the runs in it, the most recent first:", *lines]))
    if not (path / LOCK).exists():  # a local run that loads its model
        raise DataError(f"{path}: holds no run; expected the --output directory of a training")
