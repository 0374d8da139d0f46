"""Kinds of prediction files and folders, each with how it is recognised and read."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from coca_mindspeed.errors import DataError, UsageError
from coca_mindspeed.evaluation.adapters import is_ungraded, read_opencompass
from coca_mindspeed.evaluation.predictions import VALIDATIONS, Prediction, read_predictions
from coca_mindspeed.evaluation.scoreboard import file_label, prediction_files


class Reading(NamedTuple):
    """How a command reads its sources."""

    columns: Mapping[str, str] | None = None  # by field, where their names differ
    numbered: bool = False  # the number of a row is its id, in a file without ids
    grade: Callable[[Path], list[Prediction]] = read_predictions  # reads responses without a verdict; default: refuses


class Source(NamedTuple):
    """A kind of file or folder."""

    recognises: Callable[[Path, Reading], bool]
    reads: Callable[[Path, Reading], list[Prediction]]


def _read_opencompass(path: Path, reading: Reading) -> list[Prediction]:
    if reading.columns:
        raise UsageError(f"--columns: not used with {path}, the folder of an OpenCompass run")
    return read_opencompass(path)


def _read_run(path: Path, reading: Reading) -> list[Prediction]:
    """Read all prediction files of a run directory; a file's label becomes the model of its rows."""
    files = prediction_files(path)
    if not files:
        raise DataError(
            f"{path}: no predictions*.jsonl in itself or in {VALIDATIONS} and stage*/{VALIDATIONS} (of a run on a "
            "cluster, with data.evaluate), and no results/; expected a run directory, or an OpenCompass run's folder"
        )
    return [
        p if p.model is not None else replace(p, model=file_label(file, path))
        for file in files
        for p in read_predictions(file, columns=reading.columns)
    ]


def _is_opencompass(path: Path, _: Reading) -> bool:
    return path.is_dir() and (path / "results").is_dir() and not prediction_files(path)


def _is_ungraded(path: Path, reading: Reading) -> bool:
    return path.is_file() and is_ungraded(path, reading.columns)


#: The first kind that recognises a path reads it.
SOURCES = {
    "opencompass": Source(_is_opencompass, _read_opencompass),
    "run": Source(lambda path, _: path.is_dir(), _read_run),
    "responses": Source(_is_ungraded, lambda path, reading: reading.grade(path)),
    "predictions": Source(
        lambda path, _: True,
        lambda path, reading: read_predictions(path, columns=reading.columns, numbered=reading.numbered),
    ),
}


def read_source(path: Path, reading: Reading, kinds: Collection[str] = tuple(SOURCES)) -> list[Prediction]:
    """Read the predictions of ``path`` by the first of the ``kinds`` that recognises it.

    Raises DataError with file and line, or UsageError for an option that the kind does not have.
    """
    source = next(SOURCES[kind] for kind in SOURCES if kind in kinds and SOURCES[kind].recognises(path, reading))
    return source.reads(path, reading)
