"""``python -m experiments.paper``: compare runs with the paper's figures."""

import argparse
import math
import sys
from itertools import product
from pathlib import Path

from coca_mindspeed.errors import ConfigError
from coca_mindspeed.evaluation.metrics import HEADLINE_METRICS, METRIC_SPECS, UNDER_CALIBRATION_LABEL, show, show_range
from coca_mindspeed.evaluation.report import under_calibration
from coca_mindspeed.evaluation.scoreboard import DATASETS, Run, Scoreboard, read_runs
from coca_mindspeed.utils.console import markdown_table, print_markdown
from experiments.paper.figures import check_setting, paper, printed, published

HEADER = ("run", "data", "metric", "ours", "paper", "difference", "95% interval", UNDER_CALIBRATION_LABEL)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run directories and prediction files")
    setting = "model and training data of the paper's table (default: %(default)s)"
    parser.add_argument("--setting", default="qwen2.5-7b/math", help=setting)


def run(arguments: argparse.Namespace) -> int:
    check_setting(arguments.setting)
    rows = compare(Scoreboard(read_runs(arguments.runs)), arguments.setting)
    print_markdown(f"Comparison with the paper's {arguments.setting}:\n\n{markdown_table(HEADER, rows)}")
    return 0


def compare(board: Scoreboard, setting: str) -> list[list[str]]:
    """A row for every cell that the paper prints: our figure, the paper's, and the difference with our interval.

    A run is compared with the paper's method named by its predictions' ``method``, or else by its label, and answers
    from before a training with ``instruct``.  An average is compared only with the paper's average of the same data
    sets.

    Raises:
        ConfigError: the setting or a run's method is not the paper's, or there is nothing to compare.
    """
    methods = {run.label: _paper_method(run, setting) for run in board.runs}
    columns = []
    for column in board.columns:  # the paper's figure of this name, if any, is over the same data sets
        sets = DATASETS.get(column.name)
        if sets is None or (column.is_average and set(column.datasets) == set(sets)):
            columns.append(column)
    rows = []
    for run, column, metric in product(board.runs, columns, HEADLINE_METRICS):
        theirs = published(setting, methods[run.label], metric, column.name)
        ours = board.interval(run.label, column, metric)
        if math.isnan(theirs) or math.isnan(ours.estimate):
            continue
        difference = show(metric, ours.estimate - theirs, signed=True)
        bounds = show_range(metric, ours.low - theirs, ours.high - theirs, signed=True)
        beside = under_calibration(board, run, column) if metric == "ece" else ""
        figures = [show(metric, ours.estimate), printed(metric, theirs), difference, bounds, beside]
        rows.append([run.label, column.name, METRIC_SPECS[metric].label, *figures])
    if not rows:
        theirs_sets = [name for sets in DATASETS.values() for name in sets]
        raise ConfigError(
            f"nothing to compare: the runs' data sets are {', '.join(board.datasets)}, the paper's "
            f"{', '.join(theirs_sets)}"
        )
    return rows


def _paper_method(run: Run, setting: str) -> str:
    methods = paper().per_dataset[setting]
    before = "instruct" if run.method is None and run.label.endswith("before") else None
    for name in (run.method, run.label, before):
        if name in methods:
            return str(name)
    raise ConfigError(
        f"run {run.label!r}: method {run.method!r} is not in the paper's table of {setting}, which has "
        f"{', '.join(methods)}; set 'method' in its predictions"
    )


if __name__ == "__main__":
    from experiments.__main__ import main

    sys.exit(main(["paper", *sys.argv[1:]]))
