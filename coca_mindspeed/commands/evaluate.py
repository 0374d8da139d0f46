"""``coca-mindspeed evaluate``: metrics with intervals of prediction files, ours or others'."""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from coca_mindspeed.algorithm.response import ResponseParser
from coca_mindspeed.errors import ConfigError, DataError
from coca_mindspeed.evaluation.adapters import read_responses, read_rollouts
from coca_mindspeed.evaluation.catalogue import CATALOGUE, show
from coca_mindspeed.evaluation.opencompass.output import read_opencompass
from coca_mindspeed.evaluation.paper_tables import markdown_table
from coca_mindspeed.evaluation.predictions import Prediction, read_predictions, write_predictions
from coca_mindspeed.evaluation.runs import Run
from coca_mindspeed.evaluation.scoreboard import Scoreboard
from coca_mindspeed.evaluation.tokens import TokenCounter
from coca_mindspeed.evaluation.weighted import MetricOptions
from coca_mindspeed.files import write_atomically, write_json
from coca_mindspeed.grading.registry import GRADER_NAMES, build_grader

_PRINTED = ("accuracy", "auroc", "ece", "brier", "success_rate", "tokens_to_confidence")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``evaluate``."""
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="predictions, or what --format says")
    parser.add_argument("--output", type=Path, required=True, help="directory of metrics.json, .md and predictions")
    parser.add_argument(
        "--format",
        choices=("predictions", "opencompass", "rollouts", "responses"),
        default="predictions",
        help="predictions: our JSON Lines; opencompass: a run's time-stamped folder; rollouts: a dump of a training; "
        "responses: lines of id and response, graded against --gold (default: %(default)s)",
    )
    parser.add_argument("--gold", type=Path, help="records to grade responses by")
    parser.add_argument(
        "--grader", choices=GRADER_NAMES, default="auto", help="of responses; auto: by record (default: %(default)s)"
    )
    parser.add_argument("--tokenizer", type=Path, help="the model's tokenizer; counts tokens to confidence")
    parser.add_argument("--position", choices=("first", "last"), default="first", help="last: answer-first methods")
    parser.add_argument("--decimals", type=int, help="accept only confidences of so many decimals")
    parser.add_argument("--method", help="name of the method, for reports and the paper's table")
    parser.add_argument("--bins", type=int, default=10, help="bins of ECE (default: %(default)s)")
    parser.add_argument("--bin-scheme", choices=("equal_width", "equal_mass"), default="equal_width")
    parser.add_argument("--debias", action="store_true", help="take the noise of small bins off ECE")
    parser.add_argument("--replicates", type=int, default=1000, help="of the bootstrap (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the bootstrap (default: %(default)s)")
    parser.add_argument("--against", type=Path, metavar="FILE", help="predictions to subtract, paired by question")


def run(arguments: argparse.Namespace) -> int:
    """Read, measure, write and print."""
    predictions = [p for path in arguments.files for p in _read(path, arguments)]
    if arguments.method is not None:
        predictions = [replace(p, method=arguments.method) for p in predictions]
    _refuse_repeats(predictions, arguments.files)
    if arguments.bins < 1 or arguments.replicates < 1:
        raise ConfigError("--bins and --replicates should be at least 1")
    options = MetricOptions(bins=arguments.bins, scheme=arguments.bin_scheme, debias=arguments.debias)
    groups: dict[str, list[Prediction]] = {}
    for prediction in predictions:
        groups.setdefault(" ".join(filter(None, (prediction.model, prediction.method))) or "all", []).append(prediction)
    runs = [Run(label, rows, method=rows[0].method) for label, rows in groups.items()]
    board = Scoreboard(runs, replicates=arguments.replicates, seed=arguments.seed, options=options)
    table = _table(board)
    text = table
    differences: dict[str, object] = {}
    if arguments.against is not None:
        base = Run("against", read_predictions(arguments.against))
        differences, compared = _differences(board, base, arguments.against)
        text += f"\nDifference to {arguments.against.name}, paired by question:\n\n{compared}"
    write_predictions(arguments.output / "predictions.jsonl", predictions)
    write_json(arguments.output / "metrics.json", _json(board, arguments, differences))
    write_atomically(arguments.output / "metrics.md", text)
    sys.stdout.write(text)
    return 0


def _read(path: Path, arguments: argparse.Namespace) -> list[Prediction]:
    if arguments.format == "predictions":
        return read_predictions(path)
    if arguments.decimals is not None and arguments.decimals < 1:
        raise ConfigError(f"--decimals should be at least 1, found {arguments.decimals}")
    parser = ResponseParser(arguments.position, arguments.decimals)
    if arguments.format == "rollouts":
        return read_rollouts(path, parser=parser)
    tokenizer = None if arguments.tokenizer is None else TokenCounter(arguments.tokenizer)
    if arguments.format == "opencompass":
        return read_opencompass(path, parser=parser, tokenizer=tokenizer)
    if arguments.gold is None:
        raise ConfigError("--format responses needs --gold, the records that hold the gold answers")
    grader = build_grader(arguments.grader)
    try:
        return read_responses(path, arguments.gold, grader, parser=parser, tokenizer=tokenizer)
    finally:
        grader.close()


def _refuse_repeats(predictions: Sequence[Prediction], files: Sequence[Path]) -> None:
    seen = set()
    for p in predictions:
        key = (p.model, p.method, *p.key)
        if key in seen:
            raise DataError(
                f"{', '.join(map(str, files))}: {p.dataset} {p.id}, sample {p.sample}, is there twice for one method; "
                "evaluate the files apart, or tell them apart by 'method'"
            )
        seen.add(key)


def _table(board: Scoreboard) -> str:
    header = ["run", "data", "n", *(CATALOGUE[m].label for m in _PRINTED), "95% interval of ECE"]
    rows = []
    for run in board.runs:
        for column in board.columns:
            intervals = {metric: board.interval(run.label, column, metric) for metric in _PRINTED}
            ece = intervals["ece"]
            name = f"{column.name} (mean)" if column.is_average else column.name
            shown = [show(metric, interval.estimate) for metric, interval in intervals.items()]
            bounds = f"{show('ece', ece.low)} to {show('ece', ece.high)}"
            rows.append([run.label, name, board.count(run.label, column), *shown, bounds])
    return markdown_table(header, rows)


def _differences(board: Scoreboard, base: Run, path: Path) -> tuple[dict[str, object], str]:
    values: dict[str, object] = {}
    rows = []
    for run in board.runs:
        for dataset in run.by_dataset():
            found = board.difference(base, run, dataset)
            if found is None:
                continue
            values[f"{run.label}/{dataset}"] = {metric: interval.as_dict() for metric, interval in found.items()}
            cells = [
                f"{show(m, found[m].estimate, signed=True)} "
                f"({show(m, found[m].low, signed=True)} to {show(m, found[m].high, signed=True)})"
                for m in _PRINTED
            ]
            rows.append([run.label, dataset, *cells])
    if not rows:
        raise DataError(f"{path}: shares no question with the files; predictions are paired by data set, id and sample")
    return values, markdown_table(["run", "data", *(CATALOGUE[m].label for m in _PRINTED)], rows)


def _json(board: Scoreboard, arguments: argparse.Namespace, differences: dict[str, object]) -> dict[str, object]:
    results: dict[str, dict[str, object]] = {}
    for run in board.runs:
        results[run.label] = {}
        for column in board.columns:
            metrics = next(iter(board.metrics.values())).values()
            cells = {name: board.interval(run.label, column, name).as_dict() for name in metrics}
            undefined = {}
            if not column.is_average and (run.label, column.name) in board.metrics:
                undefined = dict(board.metrics[run.label, column.name].undefined)
            results[run.label][column.name] = {
                "n": board.count(run.label, column),
                "mean_of": list(column.datasets) if column.is_average else None,
                "metrics": cells,
                "undefined": undefined,
            }
    return {
        "bins": arguments.bins,
        "bin_scheme": arguments.bin_scheme,
        "debias": arguments.debias,
        "replicates": arguments.replicates,
        "seed": arguments.seed,
        "results": results,
        "differences": differences,
    }
