"""``coca-mindspeed report``: compare runs on one page, with each other and with the paper."""

import argparse
import sys
from pathlib import Path

from coca_mindspeed.errors import ConfigError
from coca_mindspeed.evaluation.paper_tables import compare_with_paper, paper_report
from coca_mindspeed.evaluation.report import write_report
from coca_mindspeed.evaluation.runs import read_runs
from coca_mindspeed.evaluation.scoreboard import Scoreboard

DEFAULT_SETTING = "qwen2.5-7b/math"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``report``."""
    parser.add_argument("runs", nargs="*", type=Path, metavar="RUN", help="run directories and prediction files")
    parser.add_argument("--output", type=Path, default=Path("report"), help="directory to write (default: %(default)s)")
    parser.add_argument("--title", default="Calibration report", help="of the page (default: %(default)s)")
    parser.add_argument("--samples", type=int, default=3, help="responses shown a run and data set (%(default)s)")
    parser.add_argument("--replicates", type=int, default=1000, help="of the bootstrap (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the bootstrap (default: %(default)s)")
    parser.add_argument(
        "--compare-paper",
        nargs="?",
        const=DEFAULT_SETTING,
        metavar="SETTING",
        help=f"put the paper's figures beside the runs'; model and training data, {DEFAULT_SETTING} if not said",
    )
    parser.add_argument("--paper", action="store_true", help="rebuild the paper's own category tables and stop")


def run(arguments: argparse.Namespace) -> int:
    """Write the report, or print the paper's tables."""
    if arguments.paper:
        if arguments.runs:
            raise ConfigError("--paper takes no runs; to put the paper beside them use --compare-paper")
        sys.stdout.write(paper_report())
        return 0
    if not arguments.runs:
        raise ConfigError("name at least one run directory or prediction file, or use --paper")
    if arguments.replicates < 1:
        raise ConfigError(f"--replicates should be at least 1, found {arguments.replicates}")
    runs = read_runs(arguments.runs)
    board = Scoreboard(runs, replicates=arguments.replicates, seed=arguments.seed)
    comparison = None
    if arguments.compare_paper is not None:
        comparison = compare_with_paper(board, arguments.compare_paper)
        sys.stdout.write(f"Beside the paper's {comparison.setting}:\n\n{comparison.markdown()}\n")
    paths = write_report(
        runs,
        arguments.output,
        title=arguments.title,
        comparison=comparison,
        board=board,
        samples=arguments.samples,
    )
    for path in paths:
        sys.stdout.write(f"{path}\n")
    return 0
