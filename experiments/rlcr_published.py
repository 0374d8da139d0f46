"""RLCR's published outputs with intervals: ``python -m experiments.rlcr_published PREDICTIONS --output DIR``.

PREDICTIONS is JSON Lines (also .gz) with dataset, method, row, confidence and correct, made from the eval_outputs of
damanimehul/RLCR as ``experiments/results/rlcr_published`` says.  The table and the paired differences go to README.md
between the marks.
"""

import argparse
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path

from coca_mindspeed.errors import DataError
from coca_mindspeed.evaluation.metrics import METRIC_SPECS, QUALITY_METRICS, MetricOptions
from coca_mindspeed.evaluation.predictions import Prediction, prediction_from_json
from coca_mindspeed.evaluation.scoreboard import Run, Scoreboard, split_runs
from coca_mindspeed.utils.console import markdown_table, print_text
from coca_mindspeed.utils.json_files import read_json_lines
from experiments.pages import renew, with_interval

TRAINED = "RLCR"
AGAINST = ("Base", "Answer-Prob")
BEGIN, END = "<!-- tables -->\n", "<!-- end of tables -->\n"
_FIELDS = ("dataset", "method", "row", "confidence", "correct")


def read_published(path: Path) -> list[Prediction]:
    """Read the predictions; DataError with file and line for a row without one of the fields."""
    return [_prediction(row, f"{path}:{number}") for number, row in read_json_lines(path)]


def _prediction(row: dict[str, object], where: str) -> Prediction:
    if missing := [name for name in _FIELDS if name not in row]:
        raise DataError(f"{where}: field {missing[0]!r} is missing; expected {', '.join(_FIELDS)}")
    return prediction_from_json({**{name: row[name] for name in _FIELDS if name != "row"}, "id": row["row"]}, where)


def tables(predictions: Sequence[Prediction]) -> str:
    """Markdown: each figure with its 95% interval, and the differences of RLCR, paired by question."""
    board = Scoreboard(split_runs(predictions, "unnamed"), options=MetricOptions(closed="left"))
    header = ["data", "n", "method", *(METRIC_SPECS[metric].heading for metric in QUALITY_METRICS)]
    figures = markdown_table(header, _figures(board))
    runs = {run.label: run for run in board.runs}
    if missing := [name for name in (TRAINED, *AGAINST) if name not in runs]:
        raise DataError(f"no predictions of {missing[0]!r}; found {', '.join(runs)}")
    header = ["data", "RLCR minus", *(METRIC_SPECS[metric].label for metric in QUALITY_METRICS)]
    return f"{figures}\nPaired by question:\n\n{markdown_table(header, _differences(board, runs))}"


def _figures(board: Scoreboard) -> Iterator[list[object]]:
    for column, run in product(board.columns, board.runs):
        cells = [with_interval(metric, board.interval(run.label, column, metric)) for metric in QUALITY_METRICS]
        yield [column.name, board.count(run.label, column), run.label, *cells]


def _differences(board: Scoreboard, runs: dict[str, Run]) -> Iterator[list[object]]:
    for dataset, name in product(board.datasets, AGAINST):
        intervals = board.difference(runs[name], runs[TRAINED], dataset).intervals
        yield [dataset, name, *(with_interval(metric, intervals[metric], signed=True) for metric in QUALITY_METRICS)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("predictions", type=Path, metavar="PREDICTIONS")
    where = Path(__file__).with_name("results") / "rlcr_published"
    parser.add_argument("--output", type=Path, default=where, metavar="DIR", help="whose README.md is renewed")
    arguments = parser.parse_args()
    text = tables(read_published(arguments.predictions))
    renew(arguments.output / "README.md", BEGIN, text, END)
    print_text(text)


if __name__ == "__main__":
    main()
