"""``coca-mindspeed report``: compare runs on one page."""

import argparse
from pathlib import Path

from coca_mindspeed.cli.options import at_least, place
from coca_mindspeed.evaluation.metrics import MetricOptions
from coca_mindspeed.evaluation.report import write_report
from coca_mindspeed.evaluation.runs import read_runs
from coca_mindspeed.evaluation.scoreboard import Scoreboard
from coca_mindspeed.utils.console import print_text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    option = parser.add_argument
    option("runs", nargs="+", type=Path, metavar="RUN", help="run directories and prediction files")
    option("--output", type=place, default=Path("report"), help="directory to write (default: %(default)s)")
    option("--title", default="Calibration report", help="title of the page (default: %(default)s)")
    option("--samples", type=at_least(0), default=3, help="responses for each run and data set (default: %(default)s)")
    option("--replicates", type=at_least(1), default=1000, help="draws for 'ECE if calibrated' (default: %(default)s)")
    option("--seed", type=at_least(0), default=0, help="seed of 'ECE if calibrated' (default: %(default)s)")
    option(
        "--bins-closed", choices=("right", "left"), default="right", help="side of a bin's edge (default: %(default)s)"
    )


def run(arguments: argparse.Namespace) -> int:
    runs = read_runs(arguments.runs)
    board = Scoreboard(
        runs, replicates=arguments.replicates, seed=arguments.seed, options=MetricOptions(closed=arguments.bins_closed)
    )
    paths = write_report(runs, arguments.output, title=arguments.title, board=board, samples=arguments.samples)
    print_text("\n".join(map(str, paths)))
    return 0
