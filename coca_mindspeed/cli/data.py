"""``coca-mindspeed data``: prepare data sets, and export them for other frameworks."""

import argparse
from collections.abc import Mapping
from contextlib import closing
from itertools import chain
from pathlib import Path
from typing import Any

from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from coca_mindspeed.algorithm.parsing import SYSTEM_PROMPTS, ConfidencePosition, thinking_prompt
from coca_mindspeed.cli.options import at_least, columns, number, place, subcommand, within
from coca_mindspeed.data.export import FRAMEWORKS, export_records
from coca_mindspeed.data.formats import SUFFIXES, HubDataset, data_files
from coca_mindspeed.data.prepare import (
    CHECKS,
    EvaluationIndex,
    Filter,
    LabelChecker,
    Preparation,
    by_difficulty,
    by_length,
    by_source,
    prepare,
)
from coca_mindspeed.data.records import read_records
from coca_mindspeed.data.registry import (
    SOURCES,
    DataSource,
    hub_dataset,
    rows_by_column,
)
from coca_mindspeed.errors import UsageError
from coca_mindspeed.grading.math.grader import MathGrader
from coca_mindspeed.grading.registry import label_checker
from coca_mindspeed.utils.console import PlainConsole, print_text
from coca_mindspeed.utils.directories import check_output_path

_PROMPTS: dict[str, ConfidencePosition] = {
    "confidence-first": "first",
    "answer-first": "last",
    "confidence-twice": "both",
}
_DESCRIBED = ("source", "exclude_source", "difficulty", "prompt", "columns", "max_tokens")  # in report.json
_DESCRIPTION = """\
Convert published files into records (docs/data.md): train.jsonl (test.jsonl for a benchmark), validation.jsonl,
findings.jsonl (one line for every dropped row) and report.json. Benchmarks are kept whole and in order; only training
sets are deduplicated and shuffled.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    summary = "turn a publisher's files into records: filtered, checked, deduplicated, split"
    _add_prepare_arguments(subcommand(actions, "prepare", summary))
    export = subcommand(actions, "export", "write prepared records as rows of another framework")
    targets = export.add_subparsers(dest="target", metavar="TARGET", required=True)
    for name, (_, reader) in FRAMEWORKS.items():
        target = subcommand(targets, name, f"JSON Lines for {reader}, each row with the chat and its whole record")
        option = target.add_argument
        option("--input", type=Path, required=True, metavar="FILE", help="records (train.jsonl, train.csv)")
        option("--columns", type=columns, metavar="JSON", help="columns of --input by field, where their names differ")
        option("--output", type=place, required=True, metavar="FILE", help="file to write")
        option("--overwrite", action="store_true", help="replace an earlier export")
        _add_prompt(target, "the method's system prompt; answer-first is for rlcr (default: %(default)s)")
        target.set_defaults(run_action=_export)


def _add_prompt(parser: argparse._ActionsContainer, meaning: str) -> None:
    parser.add_argument("--prompt", choices=sorted(_PROMPTS), default="confidence-first", help=meaning)
    parser.add_argument("--thinking", action="store_true", help="the prompt of method.thinking=true")


def _prompt(arguments: argparse.Namespace) -> str:
    prompt = SYSTEM_PROMPTS[_PROMPTS[arguments.prompt]]
    return thinking_prompt(prompt) if arguments.thinking else prompt


def run(arguments: argparse.Namespace) -> int:
    return int(arguments.run_action(arguments))


def _export(arguments: argparse.Namespace) -> int:
    prompt = _prompt(arguments)
    places = (arguments.input, arguments.output)
    rows = export_records(arguments.target, *places, prompt, arguments.overwrite, arguments.columns)
    print_text(f"{rows} records written to {arguments.output}")
    return 0


def _add_prepare_arguments(parser: argparse.ArgumentParser) -> None:
    option = parser.add_argument
    parser.description = _DESCRIPTION
    option("dataset", choices=sorted(SOURCES), metavar="DATASET", help=", ".join(SOURCES))
    origin = parser.add_mutually_exclusive_group(required=True)
    origin.add_argument(
        "--input",
        type=Path,
        nargs="+",
        metavar="PATH",
        help=f"published files or directories ({', '.join(SUFFIXES)}; text formats also .gz)",
    )
    origin.add_argument(
        "--hub",
        nargs="?",
        const="",
        metavar="REPOSITORY[:CONFIGURATION[:SPLIT]]",
        help="read it with the package 'datasets' (default: the original repository)",
    )
    meaning = 'records: JSON of columns by field: {"question": "problem", "answer": "solution"}'
    option("--columns", type=columns, metavar="JSON", help=f"{meaning}, or {{'messages': ...}} for chats")
    option("--output", type=place, required=True, metavar="DIRECTORY", help="the directory to make")
    option("--overwrite", action="store_true", help="replace an earlier output")
    skipped = "skip up to N malformed rows, and list them (default: 0)"
    option("--skip-bad", type=at_least(0), default=0, metavar="N", help=skipped)

    group = parser.add_argument_group("filters")
    filters = group.add_argument
    filters("--source", nargs="+", default=[], metavar="NAME", help="keep only these sources")
    filters("--exclude-source", nargs="+", default=[], metavar="NAME", help="drop these sources")
    filters(
        "--difficulty",
        type=within(0.0, 1.0),
        nargs=2,
        metavar=("LOW", "HIGH"),
        help="keep this range of difficulties, 0 is easiest; for Big-Math, 1 minus the solve rate",
    )
    filters("--tokenizer", type=Path, metavar="DIRECTORY", help="tokenizer that counts prompt tokens")
    filters("--max-tokens", type=at_least(1), metavar="N", help="longest prompt, chat template included")
    _add_prompt(group, "system prompt that is counted (default: %(default)s)")
    filters(
        "--decontaminate",
        action="append",
        default=[],
        type=Path,
        metavar="FILE",
        help="drop questions that share 13 words with one of these records (a prepared benchmark); repeatable",
    )
    filters(
        "--gold",
        choices=("drop", "report", "off"),
        help="treatment of gold answers that cannot be graded (default: drop; benchmarks: report)",
    )
    option(
        "--validation",
        type=number("a number from 0 to below 1", lambda value: 0 <= value < 1),
        default=0.0,
        metavar="SHARE",
        help="share for validation.jsonl (default: 0, none)",
    )
    option("--seed", type=at_least(0), default=0, help="decides order and split (default: 0)")
    parser.set_defaults(run_action=_prepare)


def _prepare(arguments: argparse.Namespace) -> int:
    """Prepare, with a progress bar on a terminal, and print the counts."""
    _check_usage(arguments)
    check_output_path(arguments.output, arguments.overwrite)
    console = PlainConsole(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}: {task.completed:,} rows"), TimeElapsedColumn())
    with (
        closing(MathGrader()) as grader,
        Progress(*columns, console=console, disable=not console.is_terminal) as progress,
    ):
        preparation = _preparation(arguments, label_checker(grader.gold_problems))
        task = progress.add_task(f"preparing {arguments.dataset}", total=None)
        report = prepare(preparation, arguments.output, arguments.overwrite, lambda: progress.advance(task))
    _print(report, arguments.output)
    return 0


def _check_usage(arguments: argparse.Namespace) -> None:
    """Refuse contradictory options before any file is read."""
    if arguments.difficulty is not None and arguments.difficulty[0] > arguments.difficulty[1]:
        raise UsageError(f"--difficulty: expected LOW <= HIGH, found {arguments.difficulty}")
    if arguments.columns and arguments.dataset != "records":
        raise UsageError(f"--columns: is for the data set records, found {arguments.dataset}")
    if (arguments.max_tokens is None) != (arguments.tokenizer is None):
        raise UsageError("--max-tokens N and --tokenizer DIRECTORY need each other")


def _preparation(arguments: argparse.Namespace, check_labels: LabelChecker) -> Preparation:
    """Return the settings of the command line; raises DataError if a file cannot be used."""
    source = SOURCES[arguments.dataset]
    if arguments.columns:
        source = rows_by_column(arguments.columns)
    inputs = arguments.input if arguments.hub is None else _hub_dataset(source, arguments.hub)
    if not isinstance(inputs, HubDataset):
        data_files(inputs)  # before tokenizers are loaded and evaluation sets read
    evaluation = None
    if arguments.decontaminate:
        evaluation = EvaluationIndex(chain.from_iterable(map(read_records, arguments.decontaminate)))
    return Preparation(
        source=source,
        inputs=inputs,
        skip_bad=arguments.skip_bad,
        filters=_filters(arguments),
        evaluation=evaluation,
        gold=arguments.gold or ("drop" if source.role == "training" else "report"),
        check_labels=check_labels,
        validation=arguments.validation,
        seed=arguments.seed,
        described={
            **{name: getattr(arguments, name) for name in _DESCRIBED},
            "decontaminate": list(map(str, arguments.decontaminate)),
            "tokenizer": None if arguments.tokenizer is None else str(arguments.tokenizer),
        },
    )


def _filters(arguments: argparse.Namespace) -> dict[str, Filter]:
    filters: dict[str, Filter] = {}
    if arguments.source or arguments.exclude_source:
        filters["source"] = by_source(frozenset(arguments.source), frozenset(arguments.exclude_source))
    if arguments.difficulty is not None:
        filters["difficulty"] = by_difficulty(*arguments.difficulty)
    if arguments.tokenizer is not None:
        prompt = _prompt(arguments)
        filters["length"] = by_length(arguments.tokenizer, prompt, arguments.max_tokens)
    return filters


def _hub_dataset(source: DataSource, named: str) -> HubDataset:
    if not named:
        if source.hub is None:
            raise UsageError(f"--hub: {source.name} has no default repository; expected --hub REPOSITORY")
        return source.hub
    return hub_dataset(named, source.hub.split if source.hub else "train")


def _print(report: Mapping[str, Any], output: Path) -> None:
    print_text(f"{report['dataset']}: {report['rows_in']} rows in, {report['rows_out']} rows out")
    for done, checks in (("dropped", report["dropped"]), ("reported and kept", report["reported"])):
        for check, reasons in checks.items():
            print_text(f"  {done}, {check} ({CHECKS[check]}): {sum(reasons.values())}")
    for name, written in report["outputs"].items():
        print_text(f"  {output / name}: {written['rows']} rows")
    print_text(f"  {output / 'report.json'}; {output / 'findings.jsonl'} has a line for each dropped row")
