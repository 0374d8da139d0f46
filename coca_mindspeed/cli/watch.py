"""``coca-mindspeed watch``: a running training in the terminal, until it has done its last step."""

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from coca_mindspeed.config.compose import validate_config
from coca_mindspeed.errors import ConfigError, DataError
from coca_mindspeed.evaluation.metrics import UNDEFINED
from coca_mindspeed.scoring.metrics import NO_SIGNAL_STEPS, gap_problem, health_problems
from coca_mindspeed.utils.console import duration, terminal_text
from coca_mindspeed.utils.directories import LOCK, PROGRESS, is_ours
from coca_mindspeed.utils.json_files import read_complete_rows
from coca_mindspeed.utils.progress import Pace
from coca_mindspeed.utils.text_formats import YamlError, read_yaml

_PAUSE = 2.0  # seconds between updates
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


def _rows(path: Path) -> list[dict[str, Any]]:
    """The complete rows of metrics.jsonl or timing.jsonl."""
    return [row for _, row in read_complete_rows(path)] if path.exists() else []


def _left(seconds: float | None) -> str:
    return "" if seconds is None else f", about {duration(seconds)} left"


def _scalars(rows: Sequence[Mapping[str, Any]]) -> Table:
    table = Table("metric", "first", "last", box=None, padding=(0, 1))
    for key, label in _SCALARS:
        if values := [row[key] for row in rows if key in row]:
            table.add_row(label, *(UNDEFINED if v is None else f"{v:.3f}" for v in (values[0], values[-1])))
    return table


def dashboard(path: Path) -> tuple[RenderableType, bool]:
    """Return the state of the run in ``path``, for rich to print, and whether the run is finished."""
    rows = _rows(path / "metrics.jsonl")
    if not rows:
        text = "waiting for the first step"
        with suppress(OSError, ValueError):  # no stage before it has written anything, or half of it
            state = json.loads((path / PROGRESS).read_text(encoding="utf-8"))
            text = f"{state['title']} {state['step']}/{state['total']}{_left(state['left'])}"
        return Panel(Text(text), title=terminal_text(str(path))), False
    step, progress, finished = rows[-1].get("step", "?"), "", False
    config = None
    with suppress(OSError, YamlError, ConfigError, TypeError, AttributeError):  # not a run of this release
        config = validate_config(read_yaml(path / "config.yaml"), path / "config.yaml")
    if config is not None and isinstance(step, int):
        total, finished = config.total_steps, step == config.total_steps
        pace = Pace(total, config.evaluation.interval, _rows(path / "timing.jsonl"))
        progress = f" of {total}{_left(pace.left(step) if step < total else None)}"
    parts: list[RenderableType] = []
    problems = {**health_problems(rows[-NO_SIGNAL_STEPS:]), **gap_problem(rows)}
    if len(rows) >= NO_SIGNAL_STEPS and problems:
        text = "\n".join(f"warning: {text}" for text in problems.values())
        parts.append(Text(f"{text}\nsee docs/training.md", style="bold red"))
    parts.append(Panel(_scalars(rows), title=terminal_text(f"{path.name}, step {step}{progress}")))
    return Group(*parts), finished


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", type=Path, metavar="DIR", help="a run's directory, which holds metrics.jsonl")
    parser.add_argument("--once", action="store_true", help="print once and stop")


def run(arguments: argparse.Namespace) -> int:
    path: Path = arguments.directory
    # The YAML is there before the first iteration on Ascend, the lock while a local run loads its model.
    begun = any((path / name).exists() for name in ("metrics.jsonl", "mindspeed_rl.yaml", LOCK))
    if not begun and not is_ours(path, "run"):
        raise DataError(f"{path}: holds no run; expected the --output directory of a training (Ascend: its stage0)")
    view, finished = dashboard(path)
    if arguments.once:
        Console(file=sys.stdout).print(view)
        return 0
    with suppress(KeyboardInterrupt), Live(view, auto_refresh=False) as live:
        while not finished:
            time.sleep(_PAUSE)
            view, finished = dashboard(path)
            live.update(view, refresh=True)
    return 0
