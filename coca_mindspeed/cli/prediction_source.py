"""Predictions of the commands that grade responses: their options, and reading a file or an OpenCompass run."""

import argparse
from collections.abc import Collection, Mapping, Sequence
from contextlib import closing
from pathlib import Path

from coca_mindspeed.algorithm.methods import METHODS
from coca_mindspeed.algorithm.parsing import END_THINK_TAG, SEGMENTS, ResponseParser
from coca_mindspeed.cli.options import THINKING_HELP, at_least, grader_option, grader_options, prediction_columns
from coca_mindspeed.errors import UsageError, did_you_mean
from coca_mindspeed.evaluation.adapters import read_responses
from coca_mindspeed.evaluation.predictions import Prediction, rows_by_field
from coca_mindspeed.evaluation.sources import SOURCES, Reading, read_source
from coca_mindspeed.grading.registry import build_grader
from coca_mindspeed.utils.console import print_note, without_password
from coca_mindspeed.utils.tokenization import TokenCounter

# Options of grading, which files of predictions do not need.
_GRADING = ("gold", "grader", "grader_options", "tokenizer", "position", "decimals", "thinking")


def add_source_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of :class:`PredictionSource`."""
    option = parser.add_argument
    fields = 'JSON of columns by field, {"confidence": "p"}, where their names differ'
    option("--columns", type=prediction_columns, metavar="JSON", help=fields)
    option("--gold", type=Path, metavar="FILE", help="records to grade responses by (default: their own column gold)")
    own = "auto: by record (default), a name of docs/grading.md, or your own: ./file.py:name, package.module:name"
    option("--grader", type=grader_option, metavar="NAME", help=f"of responses; {own}")
    option("--grader-options", type=grader_options, metavar="JSON", help="options of the grader (docs/grading.md)")
    option("--tokenizer", type=Path, help="the model's tokenizer; counts tokens to confidence of responses")
    where = "of the confidence in responses; last: answer first, both: caliber (default: by --method, or first)"
    option("--position", choices=tuple(SEGMENTS), help=where)
    option("--decimals", type=at_least(1), metavar="N", help="accept only confidences of responses with N decimals")
    option("--thinking", action="store_true", default=None, help=THINKING_HELP)


class PredictionSource:
    """Reads predictions, responses, which it grades, and OpenCompass runs by a command's options."""

    def __init__(self, arguments: argparse.Namespace, paths: Sequence[Path]) -> None:
        """Raise UsageError if one of the ``paths`` is a URL."""
        self._arguments, self._graded = arguments, False
        for path in paths:
            if str(path).startswith(("http:", "https:")):
                raise UsageError(
                    f"{without_password(str(path))}: a server's responses are collected by `coca-mindspeed collect "
                    "URL`, then evaluated"
                )

    def read(self, path: Path, *, numbered: bool, kinds: Collection[str] = tuple(SOURCES)) -> list[Prediction]:
        """Read a source of one of the ``kinds``; ``numbered``: rows without ``id`` have their number.

        Raises DataError, or UsageError for columns of an OpenCompass run.
        """
        return read_source(path, Reading(self._arguments.columns, numbered, self._grade), kinds)

    def _grade(self, path: Path) -> list[Prediction]:
        self._graded = True
        return _grade(path, self._arguments)

    def refuse_unused_options(self) -> None:
        """Raise UsageError if an option of grading was given, and nothing was graded."""
        given = [f"--{name.replace('_', '-')}" for name in _GRADING if getattr(self._arguments, name) is not None]
        if given and not self._graded:
            raise UsageError(f"{', '.join(given)}: nothing to grade, since no file has a response without a verdict")


def _grade(path: Path, arguments: argparse.Namespace) -> list[Prediction]:
    position = arguments.position
    if position is None:
        method = vars(arguments).get("method")
        position = METHODS[method].confidence_position if method in METHODS else "first"
    tokenizer = None if arguments.tokenizer is None else TokenCounter(arguments.tokenizer)
    name = arguments.grader or "auto"
    with closing(build_grader(name, arguments.grader_options)) as grader:
        predictions = read_responses(
            path,
            arguments.gold,
            grader,
            columns=arguments.columns,
            grader_name=name,
            grader_options=arguments.grader_options,
            parser=ResponseParser(position, arguments.decimals, bool(arguments.thinking)),
            tokenizer=tokenizer,
            warn=print_note,
        )
    thoughts = sum(END_THINK_TAG in p.response for p in predictions)
    if not arguments.thinking and 2 * thoughts > len(predictions):
        print_note(
            f"warning: {path}: {thoughts} of {len(predictions)} responses hold a thought, graded too; use --thinking"
        )
    hinted = arguments.position is None and _hint_at_position(predictions)
    if not hinted and all(p.confidence is None for p in predictions):
        _warn_of_no_confidence(path, arguments.columns, len(predictions))
    return predictions


def _hint_at_position(predictions: Sequence[Prediction]) -> bool:
    """Name the option if most responses state no confidence before the answer, but one after it."""
    unread = [p for p in predictions if p.confidence is None]
    parse = ResponseParser("last")
    behind = sum(parse(p.response).confidence is not None for p in unread)
    if hinted := 2 * behind > len(predictions):
        print_note(
            f"warning: {behind} of {len(predictions)} responses state their confidence last; use --position last"
        )
    return hinted


def _warn_of_no_confidence(path: Path, columns: Mapping[str, str] | None, count: int) -> None:
    names = dict.fromkeys(name for _, row in rows_by_field(path, columns) for name in row)
    where = "in the column 'confidence'"
    if "confidence" not in names:
        where = f"before its answer; the columns are {', '.join(map(repr, names))}{did_you_mean('confidence', names)}"
        where += '; --columns \'{"confidence": "COLUMN"}\' reads it from a column'
    print_note(f"warning: {path}: none of {count} responses states a valid confidence {where}")
