"""``coca-mindspeed report``: the page of a run, or one that compares runs."""

import argparse
from pathlib import Path

from coca_mindspeed.cli.options import bins_closed, place
from coca_mindspeed.evaluation.report import write_report
from coca_mindspeed.evaluation.scoreboard import read_runs
from coca_mindspeed.utils.console import print_text
from coca_mindspeed.utils.directories import check_writable, is_ours
from coca_mindspeed.utils.packages import require


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run directories and prediction files")
    where = "directory to write (default: that of a single run, and else report)"
    parser.add_argument("--output", type=place, metavar="DIR", help=where)
    bins_closed(parser)


def run(arguments: argparse.Namespace) -> int:
    require("matplotlib", purpose="the plots of a report")
    runs, closed = arguments.runs, arguments.bins_closed
    alone = runs[0] if len(runs) == 1 and runs[0].is_dir() else None
    output = arguments.output or alone or Path("report")
    check_writable(output)
    if alone is not None and is_ours(alone, "run"):
        from coca_mindspeed.local.report import is_finished, write_run_report  # torch takes seconds to import

        if is_finished(alone):
            print_text("\n".join(map(str, write_run_report(alone, output, closed=closed))))
            return 0
    print_text("\n".join(map(str, write_report(read_runs(runs), output, closed=closed))))
    return 0
