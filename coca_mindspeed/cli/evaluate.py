"""``coca-mindspeed evaluate``: metrics with intervals of predictions or responses, ours or others'."""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from coca_mindspeed.cli.collect import SAMPLING, add_sampling_options, collect
from coca_mindspeed.cli.options import at_least, bins_closed, place
from coca_mindspeed.cli.prediction_source import PredictionSource, add_source_options
from coca_mindspeed.errors import ConfigError, DataError, UsageError
from coca_mindspeed.evaluation.metrics import (
    DEFAULT_OPTIONS,
    HEADLINE_METRICS,
    METRIC_SPECS,
    UNDEFINED,
    MetricOptions,
    risk_table,
    second_metrics,
    show,
    show_range,
    suggested_threshold,
)
from coca_mindspeed.evaluation.predictions import (
    Prediction,
    answers_first,
    outcomes,
    write_predictions,
)
from coca_mindspeed.evaluation.report import (
    legend,
    not_shown_usable,
    reasons_not_usable,
    risk_tables,
    summary_table,
    write_report,
)
from coca_mindspeed.evaluation.scoreboard import (
    Column,
    PairedDifference,
    Run,
    Scoreboard,
    file_label,
    split_runs,
    unique_labels,
)
from coca_mindspeed.evaluation.sources import Reading, read_source
from coca_mindspeed.utils.console import markdown_table, one_line, print_markdown, print_note
from coca_mindspeed.utils.custom_code import is_custom
from coca_mindspeed.utils.directories import check_writable
from coca_mindspeed.utils.files import write_atomically
from coca_mindspeed.utils.json_files import replace_nonfinite, write_json
from coca_mindspeed.utils.packages import require


def add_arguments(parser: argparse.ArgumentParser) -> None:
    option = parser.add_argument
    paths = "predictions; responses to grade; runs; an OpenCompass run's time-stamped folder; with --data: a model"
    option("files", nargs="+", type=Path, metavar="PATH", help=paths)
    place_of_data = f"write metrics.json, metrics.md and predictions.jsonl there (with --data: {_EVALUATED}/MODEL-FILE)"
    option("--output", type=place, metavar="DIR", help=place_of_data)
    add_source_options(parser)
    option("--method", help="name of the method, for reports and the paper's table")
    option("--bins", type=at_least(1), default=10, help="bins of ECE (default: %(default)s)")
    bins_closed(parser)
    option("--report", action="store_true", help="also write report.html with pictures to --output (matplotlib)")
    option("--against", type=Path, metavar="FILE", help="predictions of one method to subtract, by question")
    model = parser.add_argument_group("a model: run, export, Hugging Face directory or id of the hub")
    meaning = "questions to ask PATH, a model, before the evaluation (docs/evaluation.md); the same command resumes"
    model.add_argument("--data", type=place, metavar="FILE", help=meaning)
    add_sampling_options(model)


def run(arguments: argparse.Namespace) -> int:
    if arguments.report:
        require("matplotlib", purpose="the plots of a report")
        if arguments.output is None and arguments.data is None:
            raise UsageError("--report: expected --output DIR, for report.html and its pictures")
        if arguments.bins != DEFAULT_OPTIONS.bins:
            raise UsageError(f"--report: draws {DEFAULT_OPTIONS.bins} bins; leave --bins out")
    _ask_a_model(arguments)
    if arguments.output is not None:
        check_writable(arguments.output)
    predictions = _read_all(arguments)
    base = None if arguments.against is None else _base(arguments.against)
    _refuse_repeats(predictions, arguments.files)
    _warn_of_other_questions([*predictions, *(base.predictions if base is not None else ())])
    runs = unique_labels(split_runs(predictions, "unnamed"))
    _warn_of_ungradable(runs)
    options = MetricOptions(bins=arguments.bins, closed=arguments.bins_closed)
    board = Scoreboard(runs, options=options)
    text = f"{summary_table(board)}\n{legend(HEADLINE_METRICS)}ECE has {options.bins_text}.\n{not_shown_usable(board)}"
    differences: dict[str, object] = {}
    if base is not None:
        differences, compared = _differences(board, base, arguments.against)
        name = one_line(arguments.against.name)
        text += f"\nDifference to {name}, paired by question:\n\n{compared}"
    text += _second(runs)
    for table in risk_tables(board):
        text += f"\n{one_line(table.heading)}: {table.meaning}.\n\n{table.markdown()}"
    text += _suggested(board)
    print_markdown(text)
    if arguments.output is not None:
        chosen = {"bins": options.bins, "bins_closed": options.closed, "replicates": 1000, "seed": 0}
        results = {run.label: {column.name: _cell(board, run, column) for column in board.columns} for run in runs}
        files = {name: arguments.output / name for name in ("metrics.md", "metrics.json", "predictions.jsonl")}
        write_predictions(files["predictions.jsonl"], predictions)
        write_json(files["metrics.json"], {**chosen, "results": results, "differences": differences})
        write_atomically(files["metrics.md"], text)
        print_note(f"written: {', '.join(map(str, files.values()))}")
        if arguments.report:
            page, _ = write_report(runs, arguments.output, closed=options.closed)
            print_note(f"report with pictures: {page}")
    return 0


_EVALUATED = Path("runs/evaluate")  # folders of models' responses


def _ask_a_model(arguments: argparse.Namespace) -> None:
    """With ``--data``, collect the responses of the model, and set the arguments to grade them."""
    if arguments.data is None:
        if given := [f"--{name.replace('_', '-')}" for name in SAMPLING if getattr(arguments, name) is not None]:
            raise UsageError(f"{', '.join(given)}: for a model; add --data FILE, the questions to ask")
        return
    if len(arguments.files) > 1 or arguments.gold is not None or arguments.columns is not None:
        raise UsageError("--data: expected one model, without --gold and --columns; its records hold the gold answers")
    path, trusted = arguments.files[0], arguments.trust_remote_code
    arguments.output = arguments.output or _EVALUATED / f"{path.resolve().name}-{arguments.data.stem}"
    asked = {"source": str(path), "model": None, "form": None, "temperature": 1.0}
    collected = collect(argparse.Namespace(**{**vars(arguments), **asked}))
    arguments.files, arguments.gold, arguments.method = [collected.responses], collected.gold, collected.method
    arguments.position, arguments.decimals = collected.position, arguments.decimals or collected.decimals
    arguments.thinking = arguments.thinking or collected.thinking or None
    if arguments.grader is None and collected.grader is not None:
        arguments.grader, arguments.grader_options = collected.grader
        if is_custom(arguments.grader) and not trusted:
            fix = "add --trust-remote-code if you trust whoever wrote it, or --grader"
            raise ConfigError(f"{path}: was trained with a grader of its own, {arguments.grader}; {fix}")


def _warn_of_other_questions(predictions: Sequence[Prediction]) -> None:
    """Warn if predictions that are paired, by data set and id, are answers to different questions."""
    asked: dict[tuple[str, str], set[str]] = {}
    for p in predictions:
        if p.question.strip():
            asked.setdefault((p.dataset, p.id), set()).add(" ".join(p.question.split()))
    if differ := [key for key, questions in asked.items() if len(questions) > 1]:
        dataset, name = differ[0]
        print_note(
            f"warning: {len(differ)} of {len(asked)} questions have another text in another file, the first is "
            f"{name!r} of {dataset!r}; files are paired by data set and id (a row without id has its number): give the "
            "rows the 'id' of their question, or a 'dataset' to each set of questions"
        )


def _warn_of_ungradable(runs: Sequence[Run]) -> None:
    """Warn of answers that the metrics leave out; raise DataError if these are all answers of a data set."""
    for run in runs:
        rows = run.by_dataset()
        for dataset, count in run.ungradable().items():
            if not rows[dataset]:
                raise DataError(f"{run.label}: none of the {count} answers of {dataset} could be graded")
            total = count + len(rows[dataset])
            print_note(f"warning: {run.label}: {count} of {total} answers of {dataset} are ungradable and left out")


def _base(path: Path) -> Run:
    """The predictions of one model and method that ``--against`` names."""
    runs = split_runs(read_source(path, Reading(), ("run", "predictions")), "against")
    if len(runs) > 1:
        raise ConfigError(
            f"--against {path}: holds predictions of {len(runs)} methods ({', '.join(run.label for run in runs)}); "
            "expected one method"
        )
    return runs[0]


def _read_all(arguments: argparse.Namespace) -> list[Prediction]:
    """Read all files.  The label of a file becomes the model of rows without model and method.

    ``--method`` joins the files.
    """
    # Else predictions are paired by their ids.
    alone = len(arguments.files) == 1 and arguments.against is None
    source = PredictionSource(arguments, arguments.files)

    runs = [Run(file_label(path, path), source.read(path, numbered=alone)) for path in arguments.files]
    source.refuse_unused_options()
    if arguments.method is not None:
        return [replace(p, method=arguments.method) for run in runs for p in run.predictions]
    return [
        replace(p, model=run.label) if p.model is None and p.method is None else p
        for run in unique_labels(runs)
        for p in run.predictions
    ]


def _refuse_repeats(predictions: Sequence[Prediction], files: Sequence[Path]) -> None:
    seen = set()
    for p in predictions:
        key = (p.model, p.method, *p.key)
        if key in seen:
            raise DataError(
                f"{', '.join(map(str, files))}: {p.dataset} {p.id}, sample {p.sample}, appears twice for one method; "
                "evaluate the files separately, or set 'dataset' or 'method' in their rows"
            )
        seen.add(key)


def _second(runs: Sequence[Run]) -> str:
    """Metrics of the confidences after the answers, of the runs whose predictions have them."""
    found = [
        (run.label, dataset, second)
        for run in runs
        for dataset, predictions in run.by_dataset().items()
        if (second := second_metrics(predictions))
    ]
    if not found:
        return ""
    labels = [METRIC_SPECS[name].heading for name in found[0][2]]
    rows = [[label, dataset, *(show(*each) for each in second.items())] for label, dataset, second in found]
    return f"\nConfidence after the answer:\n\n{markdown_table(['run', 'data', *labels], rows)}"


def _suggested(board: Scoreboard) -> str:
    """The threshold of each run that tells right from wrong answers best, on the data sets where it is usable."""
    text, not_usable = "", reasons_not_usable(board)
    for run in board.runs:
        usable = [dataset for dataset in run.by_dataset() if (run.label, dataset) not in not_usable]
        predictions = [p for p in run.predictions if p.dataset in usable]
        if not predictions or answers_first(predictions):
            continue
        data = outcomes(predictions)
        on = "" if len(usable) == len(run.by_dataset()) else f", {', '.join(usable)}"
        advice = "none; above every threshold, at least half of the answers are wrong"
        if (found := suggested_threshold(data.confidence, data.correct)) is not None:
            accepted = f"{found.coverage:.1%} of the answers are accepted and {found.risk:.1%} of these are wrong"
            advice = f"from {found.threshold:.6g} on, {accepted}"
        text += f"{one_line(run.label + on)}: {advice}.\n"
    if not text:
        return ""
    heading = (
        "Suggested thresholds: above each, right answers outnumber wrong ones by most; `coca-router calibrate --risk` "
        "certifies a threshold."
    )
    return f"\n{heading}\n\n{text}"


def _differences(board: Scoreboard, base: Run, path: Path) -> tuple[dict[str, object], str]:
    values: dict[str, object] = {}
    rows: list[tuple[int, Sequence[str]]] = []
    shared = 0
    for run, dataset in [(each, name) for each in board.runs for name in each.by_dataset()]:
        found = board.difference(base, run, dataset)
        counts = {"n": found.n, "n_run": found.second, "n_against": found.first}
        by_metric = {metric: interval.as_dict() for metric, interval in found.intervals.items()}
        values[f"{run.label}/{dataset}"] = {**counts, **by_metric}
        whole = found.n == found.first == found.second
        n = str(found.n) if whole else f"{found.n} of {found.second} and {found.first}"
        for order, metric in enumerate(HEADLINE_METRICS):
            shown = (METRIC_SPECS[metric].heading, run.label, dataset, n, *_difference(found, metric))
            rows.append((order, shown))
        shared += found.n
    if not shared:
        raise DataError(f"{path}: shares no question with the files; predictions are paired by data set, id and sample")
    by_metric_first = [row for _, row in sorted(rows, key=lambda row: row[0])]
    header = ("metric", "run", "data", "n", "difference", "95% interval")
    return values, markdown_table(header, by_metric_first, numbers=(4,))


def _difference(difference: PairedDifference, metric: str) -> tuple[str, str]:
    if (interval := difference.intervals.get(metric)) is None:
        return UNDEFINED, UNDEFINED
    bounds = show_range(metric, interval.low, interval.high, signed=True) or UNDEFINED
    return show(metric, interval.estimate, signed=True), bounds


def _cell(board: Scoreboard, run: Run, column: Column) -> dict[str, object]:
    rows = [] if column.is_average else run.by_dataset().get(column.name, [])
    data, second = outcomes(rows), second_metrics(rows)
    risk = None if column.is_average else risk_table(data.confidence, data.correct)
    metrics = next(iter(board.metrics.values())).values
    found = board.ece_under_calibration(run.label, column)
    own = None if column.is_average else board.metrics.get((run.label, column.name))
    return {
        "n": board.count(run.label, column),
        "ungradable": sum(run.ungradable().get(name, 0) for name in column.datasets),
        "mean_of": list(column.datasets) if column.is_average else None,
        "after_answer": replace_nonfinite(second) if second else None,
        "metrics": {name: board.interval(run.label, column, name).as_dict() for name in metrics},
        "ece_if_calibrated": None if found is None else found.as_dict(),
        "undefined": {} if own is None else dict(own.undefined),
        "risk": None if risk is None else [replace_nonfinite(row._asdict()) for row in risk],
    }
