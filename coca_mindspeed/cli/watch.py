"""``coca-mindspeed watch``: a running training in the terminal, until it has done its last step."""

import argparse
import shlex
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.live import Live

from coca_mindspeed.cli.options import above
from coca_mindspeed.errors import DataError
from coca_mindspeed.evaluation.reports.live import RunDirectory, dashboard
from coca_mindspeed.local.run_directory import LOCK


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", type=Path, metavar="DIR", help="a run's directory, which holds metrics.jsonl")
    parser.add_argument("--interval", type=above(0), default=2.0, help="seconds between looks (default: %(default)s)")
    parser.add_argument("--once", action="store_true", help="print what there is and stop")


def run(arguments: argparse.Namespace) -> int:
    if not arguments.directory.is_dir():
        raise DataError(f"{arguments.directory}: is not a directory; expected the --output directory of a training")
    directory = RunDirectory(arguments.directory)
    _require_run(directory)
    if arguments.once:
        Console(file=sys.stdout).print(dashboard(directory))
        return 0
    try:
        with Live(dashboard(directory), auto_refresh=False) as live:
            finished = False
            while not finished:
                time.sleep(max(0.1, arguments.interval))
                finished = directory.finished()  # before the look, so that the last step is shown
                live.update(dashboard(directory), refresh=True)
    except KeyboardInterrupt:
        pass
    return 0


def _require_run(directory: RunDirectory) -> None:
    """Raise DataError if no run has begun or is about to begin in the directory; names the runs below it."""
    if directory.is_run():
        return
    if runs := directory.runs_below():
        lines = [f"    coca-mindspeed watch {shlex.quote(str(run))}" for run in runs]
        raise DataError("\n".join([f"{directory.path}: is not a run; the runs in it, the most recent first:", *lines]))
    if not (directory.path / LOCK).exists():  # a local run that loads its model
        raise DataError(f"{directory.path}: holds no run; expected the --output directory of a training")
