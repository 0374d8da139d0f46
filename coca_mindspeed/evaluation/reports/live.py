"""A running training as text: the calibration scalars with their recent course, and a reliability table.

What TensorBoard shows in a browser (:func:`.plots.reliability_image`), for a terminal.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from coca_mindspeed.config.compose import validate_run
from coca_mindspeed.errors import ConfigError, DataError
from coca_mindspeed.evaluation.metrics.binning import bin_table
from coca_mindspeed.evaluation.metrics.calibration import calibration_metrics
from coca_mindspeed.evaluation.metrics.specs import UNDEFINED, metric_info, show
from coca_mindspeed.scoring.metrics import NO_SIGNAL_STEPS, health_problems
from coca_mindspeed.utils.console import terminal_text
from coca_mindspeed.utils.eta import STEPS, Pace, duration
from coca_mindspeed.utils.files import read_json_lines
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
# Rollout samples of so many files make the reliability table: one file holds few answers.
_SAMPLE_FILES = 20


class RunDirectory:
    """Reads what a trainer has written so far."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def metrics(self) -> list[dict[str, Any]]:
        """The complete rows of metrics.jsonl; a last line that is still being written is left for the next look."""
        return self._complete_rows("metrics.jsonl")

    def progress(self, done: int) -> str:
        """``of 300, about 4 min left`` at the step that was ``done`` last; "" where the run does not say."""
        path = self.path / "config.yaml"
        try:
            values = read_yaml(path)
            config = validate_run(values, (path,)) if isinstance(values, dict) else None
        except (OSError, YamlError, ConfigError):
            config = None
        if config is None:  # another release's, or no run of ours
            return ""
        total = config.trainer.steps * len(config.method.training_method.stages)
        timing = self._complete_rows("timing.jsonl")[-max(STEPS, config.evaluation.interval) :]
        left = Pace.of_training(total, config.evaluation.interval, timing).left(done) if done < total else None
        return f" of {total}" + ("" if left is None else f", about {duration(left)} left")

    def _complete_rows(self, name: str) -> list[dict[str, Any]]:
        path = self.path / name
        if not path.exists():
            return []
        rows = []
        try:
            for _, row in read_json_lines(path):
                rows.append(row)
        except DataError:
            if path.read_bytes().endswith(b"\n"):
                raise
        return rows

    def samples(self) -> list[dict[str, Any]]:
        """Rows of the newest sample files."""
        paths = sorted((self.path / "samples").glob("*.jsonl"))[-_SAMPLE_FILES:]
        return [row for path in paths for _, row in read_json_lines(path)]


def sparkline(values: Sequence[float], width: int = _WIDTH) -> str:
    """The course of a metric in ``width`` characters, each the mean of its share of the values."""
    known = np.array([value for value in values if not math.isnan(value)])
    if not len(known):
        return ""
    means = np.array([part.mean() for part in np.array_split(known, min(width, len(known)))])
    low, high = means.min(), means.max()
    level = np.zeros(len(means)) if high == low else (means - low) / (high - low)
    return "".join(_BLOCKS[round(x * (len(_BLOCKS) - 1))] for x in level)


def _scalars(rows: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(box=None, padding=(0, 1))
    for name, justify in (("metric", "left"), ("first", "right"), ("last", "right"), ("course", "left")):
        table.add_column(name, justify="right" if justify == "right" else "left")
    for key, label in _SCALARS:
        if not any(key in row for row in rows):
            continue
        values = [math.nan if row[key] is None else float(row[key]) for row in rows if key in row]
        ends = [UNDEFINED if math.isnan(value) else f"{value:.3f}" for value in (values[0], values[-1])]
        table.add_row(label, *ends, sparkline(values))
    return table


def _reliability(samples: Sequence[Mapping[str, Any]]) -> RenderableType:
    usable = [row for row in samples if isinstance(row.get("correct"), bool) and "confidence" in row]
    if not usable:
        return Text("no rollout samples yet")
    confidence = np.array([math.nan if row["confidence"] is None else float(row["confidence"]) for row in usable])
    correct = np.array([row["correct"] for row in usable])
    bins = bin_table(confidence, correct)
    metrics = calibration_metrics(confidence, correct)
    table = Table(box=None, padding=(0, 1))
    for name in ("confidence", "answers", "right"):
        table.add_column(name, justify="right")
    table.add_column("█ share of right answers   │ stated confidence")
    for i, count in enumerate(bins.count):
        span = f"{bins.edges[i]:.1f}-{bins.edges[i + 1]:.1f}"
        if not count:
            table.add_row(span, "0", UNDEFINED, "")
            continue
        bar = ["█" if (k + 0.5) / _WIDTH <= bins.accuracy[i] else " " for k in range(_WIDTH)]
        bar[min(_WIDTH - 1, int(bins.confidence[i] * _WIDTH))] = "│"
        table.add_row(span, f"{count}", f"{bins.accuracy[i]:.2f}", "".join(bar))
    values = metrics.values()
    shown = ", ".join(f"{metric_info(name).label} {show(name, values[name])}" for name in ("ece", "auroc", "brier"))
    return Group(table, Text(f"{metrics.n_valid} of {metrics.n} answers state a confidence; {shown}"))


def _warnings(rows: Sequence[Mapping[str, Any]]) -> list[RenderableType]:
    if len(rows) < NO_SIGNAL_STEPS or not (problems := health_problems(rows[-NO_SIGNAL_STEPS:])):
        return []
    text = "\n".join(f"warning: {problem.text}" for problem in problems)
    return [Text(f"{text}\ndocs/training.md says what to do", style="bold red")]


def _where(directory: RunDirectory, newest: Mapping[str, Any]) -> str:
    step = newest.get("step", "?")
    return f"step {step}" + (directory.progress(step) if isinstance(step, int) else "")


def dashboard(directory: RunDirectory) -> RenderableType:
    """What is known about a run, for rich to print."""
    rows = directory.metrics()
    if not rows:
        return Panel(Text("waiting for the first step"), title=terminal_text(str(directory.path)))
    return Group(
        *_warnings(rows),
        Panel(_scalars(rows), title=terminal_text(f"{directory.path.name}, {_where(directory, rows[-1])}")),
        Panel(_reliability(directory.samples()), title="Reliability of the latest rollout samples"),
    )
