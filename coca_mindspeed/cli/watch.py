"""``coca-mindspeed watch``: a running training in the terminal, until it has done its last step."""

import argparse
import json
import math
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
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
from coca_mindspeed.config.compose import validate_run
from coca_mindspeed.config.schema import RunConfig
from coca_mindspeed.errors import ConfigError, DataError
from coca_mindspeed.evaluation.binning import bin_table
from coca_mindspeed.evaluation.metrics import METRIC_SPECS, UNDEFINED, calibration_metrics, show
from coca_mindspeed.local.progress import Pace
from coca_mindspeed.local.run_directory import LOCK
from coca_mindspeed.scoring.metrics import NO_SIGNAL_STEPS, health_problems
from coca_mindspeed.utils.console import duration, terminal_text
from coca_mindspeed.utils.files import PROGRESS, is_ours, read_complete_rows, read_json_lines
from coca_mindspeed.utils.text_formats import YamlError, read_yaml

_BLOCKS = "▁▂▃▄▅▆▇█"
_WIDTH = 30
_SCALARS: tuple[tuple[str, str], ...] = (
    ("reward/confidence", "confidence reward"),
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
_BEGUN = ("metrics.jsonl", "mindspeed_rl.yaml")  # the latter is there before the first iteration on Ascend
_SAMPLE_FILES = 20  # newest files of rollout samples behind the reliability table; each holds few answers


class RunDirectory:
    """Reads the files of a running training."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def config(self) -> RunConfig | None:
        """Return the run's configuration; None if it cannot be read."""
        path = self.path / "config.yaml"
        try:
            return validate_run(read_yaml(path), path)
        except (OSError, YamlError, ConfigError, TypeError, AttributeError):  # not a run of this release
            return None

    def is_run(self) -> bool:
        """Whether a run of any engine has begun here."""
        return is_ours(self.path, "run") or any((self.path / name).exists() for name in _BEGUN)

    def stage(self) -> str:
        """Return how far the stage before the first step is; empty if it has written nothing."""
        try:
            state = json.loads((self.path / PROGRESS).read_text(encoding="utf-8"))
        except (OSError, ValueError):  # not there, or half written
            return ""
        left = "" if state["left"] is None else f", about {duration(state['left'])} left"
        return f"{state['title']} {state['step']}/{state['total']}{left}"

    def progress(self, done: int) -> tuple[str, bool]:
        """Return ``of 300, about 4 min left`` after step ``done`` (empty: unknown), and whether it is the last."""
        if (config := self.config()) is None:
            return "", False
        total, interval = config.total_steps, config.evaluation.interval
        left = Pace.of_training(total, interval, self.rows("timing.jsonl")).left(done) if done < total else None
        return f" of {total}" + ("" if left is None else f", about {duration(left)} left"), done == total

    def samples(self) -> list[dict[str, Any]]:
        """Return the rows of the newest sample files."""
        paths = sorted((self.path / "samples").glob("*.jsonl"))[-_SAMPLE_FILES:]
        return [row for path in paths for _, row in read_json_lines(path)]

    def rows(self, name: str) -> list[dict[str, Any]]:
        """Return the complete rows of metrics.jsonl or timing.jsonl."""
        path = self.path / name
        return [row for _, row in read_complete_rows(path)] if path.exists() else []


def sparkline(values: Sequence[float], width: int = _WIDTH) -> str:
    """Draw a metric over time in ``width`` characters, each the mean of its part of the values."""
    known = np.array([value for value in values if not math.isnan(value)])
    if not len(known):
        return ""
    means = np.array([part.mean() for part in np.array_split(known, min(width, len(known)))])
    low, high = means.min(), means.max()
    level = np.zeros(len(means)) if high == low else (means - low) / (high - low)
    return "".join(_BLOCKS[round(x * (len(_BLOCKS) - 1))] for x in level)


def _scalars(rows: Sequence[Mapping[str, Any]]) -> Table:
    table = Table("metric", "first", "last", "course", box=None, padding=(0, 1))
    for key, label in _SCALARS:
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


def dashboard(directory: RunDirectory) -> tuple[RenderableType, bool]:
    """Return the state of a run, for rich to print, and whether the run is finished."""
    rows = directory.rows("metrics.jsonl")
    if not rows:
        text = directory.stage() or "waiting for the first step"
        return Panel(Text(text), title=terminal_text(str(directory.path))), False
    step = rows[-1].get("step", "?")
    progress, finished = directory.progress(step) if isinstance(step, int) else ("", False)
    parts: list[RenderableType] = []
    if len(rows) >= NO_SIGNAL_STEPS and (problems := health_problems(rows[-NO_SIGNAL_STEPS:])):
        text = "\n".join(f"warning: {problem.text}" for problem in problems)
        parts.append(Text(f"{text}\nsee docs/training.md", style="bold red"))
    parts.append(Panel(_scalars(rows), title=terminal_text(f"{directory.path.name}, step {step}{progress}")))
    parts.append(Panel(_reliability(directory.samples()), title="Reliability of the latest rollout samples"))
    return Group(*parts), finished


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", type=Path, metavar="DIR", help="a run's directory, which holds metrics.jsonl")
    parser.add_argument("--interval", type=above(0), default=2.0, help="seconds between updates (default: %(default)s)")
    parser.add_argument("--once", action="store_true", help="print once and stop")


def run(arguments: argparse.Namespace) -> int:
    if not arguments.directory.is_dir():
        raise DataError(f"{arguments.directory}: is not a directory; expected the --output directory of a training")
    directory = RunDirectory(arguments.directory)
    _require_run(directory)
    view, finished = dashboard(directory)
    if arguments.once:
        Console(file=sys.stdout).print(view)
        return 0
    with suppress(KeyboardInterrupt), Live(view, auto_refresh=False) as live:
        while not finished:
            time.sleep(max(0.1, arguments.interval))
            view, finished = dashboard(directory)
            live.update(view, refresh=True)
    return 0


def _require_run(directory: RunDirectory) -> None:
    """Raise DataError if no run has begun or is about to begin in the directory; names the runs below it."""
    path = directory.path
    if directory.is_run():
        return
    below = [each for pattern in ("*/", "*/*/") for each in path.glob(pattern) if RunDirectory(each).is_run()]
    if runs := sorted(below, key=lambda run: run.stat().st_mtime, reverse=True):
        lines = [f"    coca-mindspeed watch {shlex.quote(str(run))}" for run in runs]
        raise DataError("\n".join([f"{path}: is not a run; the runs in it, the most recent first:", *lines]))
    if not (path / LOCK).exists():  # a local run that loads its model
        raise DataError(f"{path}: holds no run; expected the --output directory of a training")
