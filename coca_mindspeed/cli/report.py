"""``coca-mindspeed report``: compare runs on one page."""

import argparse
from pathlib import Path

from coca_mindspeed.cli.options import bins_closed, place
from coca_mindspeed.evaluation.report import write_report
from coca_mindspeed.evaluation.scoreboard import read_runs
from coca_mindspeed.utils.console import print_text
from coca_mindspeed.utils.packages import require


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run directories and prediction files")
    parser.add_argument("--output", type=place, default=Path("report"), help="directory to write (default: report)")
    bins_closed(parser)


def run(arguments: argparse.Namespace) -> int:
    require("matplotlib", purpose="the plots of a report")
    paths = write_report(read_runs(arguments.runs), arguments.output, closed=arguments.bins_closed)
    print_text("\n".join(map(str, paths)))
    return 0
