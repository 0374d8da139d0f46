"""``coca-mindspeed report``: compare runs on one page, with each other and with the paper."""

import argparse
from pathlib import Path

from coca_mindspeed.cli.options import at_least, place
from coca_mindspeed.errors import UsageError
from coca_mindspeed.evaluation.metrics.weighted import MetricOptions
from coca_mindspeed.evaluation.paper.comparison import compare_with_paper, paper_report
from coca_mindspeed.evaluation.paper.published import check_setting
from coca_mindspeed.evaluation.reports.report import write_report
from coca_mindspeed.evaluation.reports.scoreboard import Scoreboard
from coca_mindspeed.evaluation.runs import read_runs
from coca_mindspeed.utils.console import print_text
from coca_mindspeed.utils.markdown import print_markdown

DEFAULT_SETTING = "qwen2.5-7b/math"
_DEFAULTS = {
    "output": Path("report"),
    "title": "Calibration report",
    "samples": 3,
    "replicates": 1000,
    "seed": 0,
    "bins_closed": "right",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    defaults = {name: f"(default: {value})" for name, value in _DEFAULTS.items()}  # None marks an option not given
    parser.add_argument("runs", nargs="*", type=Path, metavar="RUN", help="run directories and prediction files")
    parser.add_argument("--output", type=place, help=f"directory to write {defaults['output']}")
    parser.add_argument("--title", help=f"of the page {defaults['title']}")
    parser.add_argument("--samples", type=at_least(0), help=f"responses shown a run and data set {defaults['samples']}")
    parser.add_argument("--replicates", type=at_least(1), help=f"of the bootstrap {defaults['replicates']}")
    parser.add_argument("--seed", type=at_least(0), help=f"of the bootstrap {defaults['seed']}")
    parser.add_argument(
        "--bins-closed", choices=("right", "left"), help=f"side of a bin's edge {defaults['bins_closed']}"
    )
    parser.add_argument(
        "--compare-paper",
        nargs="?",
        const=DEFAULT_SETTING,
        metavar="SETTING",
        help=f"compare with the paper's figures of this model and training data (default: {DEFAULT_SETTING})",
    )
    parser.add_argument("--paper", action="store_true", help="print the paper's own category tables, rebuilt, and stop")


def run(arguments: argparse.Namespace) -> int:
    """Write the report, or print the paper's tables."""
    if arguments.paper:
        if arguments.runs:
            raise UsageError("--paper takes no runs; use --compare-paper to compare them with the paper")
        if given := [name for name in (*_DEFAULTS, "compare_paper") if getattr(arguments, name) is not None]:
            named = ", ".join("--" + name.replace("_", "-") for name in given)
            raise UsageError(f"{named}: not used with --paper, which prints only the paper's tables")
        print_markdown(paper_report())
        return 0
    for name, value in _DEFAULTS.items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, value)
    if not arguments.runs:
        raise UsageError("name at least one run directory or prediction file, or use --paper")
    if arguments.compare_paper is not None:
        check_setting(arguments.compare_paper)
    runs = read_runs(arguments.runs)
    board = Scoreboard(
        runs, replicates=arguments.replicates, seed=arguments.seed, options=MetricOptions(closed=arguments.bins_closed)
    )
    comparison = None
    if arguments.compare_paper is not None:
        comparison = compare_with_paper(board, arguments.compare_paper)
        print_markdown(f"Comparison with the paper's {comparison.setting}:\n\n{comparison.markdown()}\n")
    paths = write_report(
        runs, arguments.output, title=arguments.title, comparison=comparison, board=board, samples=arguments.samples
    )
    print_text("\n".join(map(str, paths)))
    return 0
