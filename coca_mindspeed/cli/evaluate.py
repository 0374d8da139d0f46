"""``coca-mindspeed evaluate``: metrics with intervals of prediction files, ours or others'."""

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from coca_mindspeed.algorithm.parsing import ResponseParser
from coca_mindspeed.cli.options import at_least, json_object, place
from coca_mindspeed.errors import ConfigError, DataError, UsageError
from coca_mindspeed.evaluation.adapters import read_responses, read_rollouts
from coca_mindspeed.evaluation.metrics.curves import risk_table
from coca_mindspeed.evaluation.metrics.specs import (
    CALIBRATED_LABEL,
    CATALOGUE,
    HEADLINE_METRICS,
    UNDEFINED,
    show,
    show_calibrated,
    show_range,
)
from coca_mindspeed.evaluation.metrics.weighted import MetricOptions
from coca_mindspeed.evaluation.opencompass.output import read_opencompass
from coca_mindspeed.evaluation.predictions import Prediction, outcomes, write_predictions
from coca_mindspeed.evaluation.reports.scoreboard import PairedDifference, Scoreboard
from coca_mindspeed.evaluation.reports.tables import risk_tables, transfer_tables
from coca_mindspeed.evaluation.runs import Run, file_label, prediction_files, read_named, split_runs, unique_labels
from coca_mindspeed.evaluation.tokens import TokenCounter
from coca_mindspeed.grading.registry import GRADER_NAMES, build_grader
from coca_mindspeed.utils.console import one_line, print_text
from coca_mindspeed.utils.files import write_atomically, write_json
from coca_mindspeed.utils.markdown import markdown_table

# Which options each format can use; the others would be ignored.
_OPTIONS_OF = {
    "predictions": (),
    "rollouts": ("position", "decimals"),
    "opencompass": ("position", "decimals", "tokenizer"),
    "responses": ("position", "decimals", "tokenizer", "gold", "grader", "grader_options"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``evaluate``."""
    parser.add_argument(
        "files", nargs="+", type=Path, metavar="PATH", help="predictions or run directories, or what --format says"
    )
    parser.add_argument("--output", type=place, required=True, help="directory of metrics.json, .md and predictions")
    parser.add_argument(
        "--format",
        choices=tuple(_OPTIONS_OF),
        default="predictions",
        help="predictions: our JSON Lines; opencompass: a run's time-stamped folder; rollouts: a dump of a training; "
        "responses: lines of id and response, graded against --gold (default: %(default)s)",
    )
    parser.add_argument("--gold", type=Path, help="records to grade responses by")
    parser.add_argument("--grader", choices=GRADER_NAMES, help="of responses; auto: by record (default: auto)")
    parser.add_argument("--grader-options", type=json_object, metavar="JSON", help="the grader's own (docs/grading.md)")
    parser.add_argument("--tokenizer", type=Path, help="the model's tokenizer; counts tokens to confidence")
    parser.add_argument("--position", choices=("first", "last"), help="last: answer-first methods (default: first)")
    parser.add_argument("--decimals", type=at_least(1), help="accept only confidences of so many decimals")
    parser.add_argument("--method", help="name of the method, for reports and the paper's table")
    parser.add_argument("--bins", type=at_least(1), default=10, help="bins of ECE (default: %(default)s)")
    parser.add_argument("--bin-scheme", choices=("equal_width", "equal_mass"), default="equal_width")
    parser.add_argument(
        "--bins-closed", choices=("right", "left"), default="right", help="side of a bin's edge (default: %(default)s)"
    )
    parser.add_argument("--debias", action="store_true", help="take the noise of small bins off ECE")
    parser.add_argument("--replicates", type=at_least(1), default=1000, help="of the bootstrap (default: %(default)s)")
    parser.add_argument("--seed", type=at_least(0), default=0, help="of the bootstrap (default: %(default)s)")
    parser.add_argument(
        "--against", type=Path, metavar="FILE", help="predictions of one method to subtract, by question"
    )


def run(arguments: argparse.Namespace) -> int:
    """Read, measure, write and print."""
    _check_usage(arguments)
    predictions = [p for path in arguments.files for p in _read(path, arguments)]
    if arguments.method is not None:
        predictions = [replace(p, method=arguments.method) for p in predictions]
    _refuse_repeats(predictions, arguments.files)
    options = MetricOptions(
        bins=arguments.bins, scheme=arguments.bin_scheme, closed=arguments.bins_closed, debias=arguments.debias
    )
    runs = _runs(predictions)
    _tell_ungradable(runs)
    board = Scoreboard(runs, replicates=arguments.replicates, seed=arguments.seed, options=options)
    text = f"{_table(board)}\nECE: {options.bins_text}.\n"
    differences: dict[str, object] = {}
    if arguments.against is not None:
        differences, compared = _differences(board, _base(arguments.against), arguments.against)
        name = one_line(arguments.against.name)
        text += f"\nDifference to {name}, paired by question:\n\n{compared}"
    for kind in (*risk_tables(board), *transfer_tables(board)):
        text += f"\n{kind.heading}: {kind.meaning}.\n\n{kind.markdown()}"
    write_predictions(arguments.output / "predictions.jsonl", predictions)
    write_json(arguments.output / "metrics.json", _json(board, arguments, differences))
    write_atomically(arguments.output / "metrics.md", text)
    sys.stdout.write(text)
    return 0


def _tell_ungradable(runs: Sequence[Run]) -> None:
    """Say on standard error how many answers the metrics leave out.

    Raises:
        DataError: they leave out all answers of a data set.
    """
    for run in runs:
        rows = run.by_dataset()
        for dataset, count in run.ungradable().items():
            if not rows[dataset]:
                raise DataError(f"{run.label}: none of the {count} answers of {dataset} could be graded")
            total = count + len(rows[dataset])
            text = f"warning: {run.label}: {count} of {total} answers of {dataset} are ungradable and left out"
            print_text(text, sys.stderr)


def _check_usage(arguments: argparse.Namespace) -> None:
    usable = _OPTIONS_OF[arguments.format]
    every = _OPTIONS_OF["responses"]
    if ignored := [name for name in every if name not in usable and getattr(arguments, name) is not None]:
        formats = [name for name, own in _OPTIONS_OF.items() if ignored[0] in own]
        typed = [f"--{name.replace('_', '-')}" for name in ignored]
        raise UsageError(
            f"{', '.join(typed)}: means nothing with --format {arguments.format}; {typed[0]} is for "
            f"--format {' or '.join(formats)}"
        )
    if arguments.format == "responses" and arguments.gold is None:
        raise UsageError("--format responses needs --gold, the records that hold the gold answers")


def _runs(predictions: Sequence[Prediction]) -> list[Run]:
    """A run for each model and method, labelled by what they are called."""
    runs = split_runs(predictions, "all")
    if len(runs) == 1:
        first = predictions[0]
        runs = [replace(runs[0], label=" ".join(filter(None, (first.model, first.method))) or "all")]
    return unique_labels(runs)


def _base(path: Path) -> Run:
    """What ``--against`` names: predictions of one model and method."""
    runs = split_runs(_predictions(path), "against")
    if len(runs) > 1:
        raise ConfigError(
            f"--against {path}: holds predictions of {len(runs)} methods ({', '.join(run.label for run in runs)}); "
            "a difference is to one, so name a file with one of them"
        )
    return replace(runs[0], label="against")


def _predictions(path: Path) -> list[Prediction]:
    """Predictions of a file, or of all prediction files of a run directory, told apart by what they are called."""
    if not path.is_dir():
        return read_named(path)
    files = prediction_files(path)
    if not files:
        raise DataError(f"{path}: holds no predictions*.jsonl; expected a run directory, or name --format")
    return [
        p if p.model is not None else replace(p, model=file_label(file, path))
        for file in files
        for p in read_named(file)
    ]


def _read(path: Path, arguments: argparse.Namespace) -> list[Prediction]:
    if arguments.format == "predictions":
        return _predictions(path)
    parser = ResponseParser(arguments.position or "first", arguments.decimals)
    if arguments.format == "rollouts":
        return read_rollouts(path, parser=parser)
    tokenizer = None if arguments.tokenizer is None else TokenCounter(arguments.tokenizer)
    if arguments.format == "opencompass":
        return read_opencompass(path, parser=parser, tokenizer=tokenizer)
    grader = build_grader(arguments.grader or "auto", arguments.grader_options)
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
    labels = [CATALOGUE[metric].heading for metric in HEADLINE_METRICS]
    header = ["run", "data", "n", *labels, "95% interval of ECE", CALIBRATED_LABEL]
    rows = []
    for run in board.runs:
        for column in board.columns:
            intervals = {metric: board.interval(run.label, column, metric) for metric in HEADLINE_METRICS}
            ece, calibrated = intervals["ece"], board.calibrated(run.label, column)
            name = f"{column.name} (mean)" if column.is_average else column.name
            shown = [show(metric, interval.estimate) for metric, interval in intervals.items()]
            beside = UNDEFINED if calibrated is None else show_calibrated(calibrated.mean, calibrated.high)
            bounds = show_range("ece", ece.low, ece.high) or UNDEFINED
            rows.append([run.label, name, board.count(run.label, column), *shown, bounds, beside])
    return markdown_table(header, rows)


def _differences(board: Scoreboard, base: Run, path: Path) -> tuple[dict[str, object], str]:
    values: dict[str, object] = {}
    rows: list[list[str]] = []
    shared = 0
    for run in board.runs:
        for dataset in run.by_dataset():
            found = board.difference(base, run, dataset)
            counts = {"n": found.n, "n_run": found.second, "n_against": found.first}
            by_metric = {metric: interval.as_dict() for metric, interval in found.intervals.items()}
            values[f"{run.label}/{dataset}"] = {**counts, **by_metric}
            whole = found.n == found.first == found.second
            n = str(found.n) if whole else f"{found.n} of {found.second} and {found.first}"
            rows.append([run.label, dataset, n, *(_difference(found, metric) for metric in HEADLINE_METRICS)])
            shared += found.n
    if not shared:
        raise DataError(f"{path}: shares no question with the files; predictions are paired by data set, id and sample")
    return values, markdown_table(["run", "data", "n", *(CATALOGUE[m].label for m in HEADLINE_METRICS)], rows)


def _difference(found: PairedDifference, metric: str) -> str:
    if (interval := found.intervals.get(metric)) is None:
        return UNDEFINED
    bounds = show_range(metric, interval.low, interval.high, signed=True) or UNDEFINED
    return f"{show(metric, interval.estimate, signed=True)} ({bounds})"


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
                "ungradable": sum(run.ungradable().get(name, 0) for name in column.datasets),
                "mean_of": list(column.datasets) if column.is_average else None,
                "metrics": cells,
                "ece_if_calibrated": None if (of := board.calibrated(run.label, column)) is None else of.as_dict(),
                "undefined": undefined,
                "risk": None if column.is_average else _risk(run, column.name),
            }
    return {
        "bins": arguments.bins,
        "bin_scheme": arguments.bin_scheme,
        "bins_closed": arguments.bins_closed,
        "debias": arguments.debias,
        "replicates": arguments.replicates,
        "seed": arguments.seed,
        "results": results,
        "transfer": {
            label: {source: _none_for_nan(row) for source, row in matrix.items()}
            for label, matrix in board.transfers.items()
        },
        "differences": differences,
    }


def _risk(run: Run, dataset: str) -> list[dict[str, float | None]]:
    data = outcomes(run.by_dataset().get(dataset, []))
    return [_none_for_nan(row._asdict()) for row in risk_table(data.confidence, data.correct)]


def _none_for_nan(values: Mapping[str, float]) -> dict[str, float | None]:
    return {name: None if math.isnan(value) else value for name, value in values.items()}
