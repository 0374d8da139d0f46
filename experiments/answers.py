"""Graded answers with readings of their confidence, and the files that hold them.

A stated confidence is one draw.  Readings of it are the greedy number and the expectation over the policy's
probabilities of all numbers, which :mod:`experiments.readings` computes.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from coca_mindspeed.errors import DataError
from coca_mindspeed.evaluation.predictions import Prediction, is_confidence, prediction_from_json, prediction_to_json
from coca_mindspeed.utils.json_files import read_json_lines, write_json_lines

READINGS = ("draw", "greedy", "expectation")
_LEAST_MASS = 0.95


@dataclass(frozen=True, slots=True)
class Reading:
    """Readings of one question's confidence, in [0, 1]; the names are those of columns in files."""

    greedy_confidence: float  # the number of greedy decoding
    expected_confidence: float  # under the policy's probabilities of the numbers, normalised
    confidence_mass: float  # sum of these probabilities; the rest of the probability is on other text


_COLUMNS = tuple(field.name for field in fields(Reading))


@dataclass(frozen=True, slots=True)
class Answer(Prediction):
    """A prediction and the readings of its question's confidence; None: not computed."""

    reading: Reading | None = None


def read_answers(path: Path) -> list[Answer]:
    """Read a file of :func:`write_answers` or of plain predictions; DataError for a row that is neither."""
    return [_answer(row, f"{path}:{number}") for number, row in read_json_lines(path)]


def _answer(row: Mapping[str, Any], where: str) -> Answer:
    columns = {name: row[name] for name in _COLUMNS if row.get(name) is not None}
    if columns and not (len(columns) == len(_COLUMNS) and all(map(is_confidence, columns.values()))):
        raise DataError(f"{where}: expected {', '.join(_COLUMNS)}, each from 0 to 1, found {columns}")
    return with_reading(prediction_from_json(row, where), Reading(**columns) if columns else None)


def with_reading(prediction: Prediction, reading: Reading | None) -> Answer:
    """The answer with these readings in place of its own."""
    values = {field.name: getattr(prediction, field.name) for field in fields(Prediction)}
    return Answer(**values, reading=reading)


def write_answers(path: Path, answers: Iterable[Prediction]) -> None:
    """Write predictions atomically as JSON Lines, with the columns of :class:`Reading` where readings are known."""
    write_json_lines(path, map(_row, answers))


def _row(prediction: Prediction) -> dict[str, Any]:
    reading = _reading(prediction)
    return {**prediction_to_json(prediction), **({} if reading is None else asdict(reading))}


def _reading(prediction: Prediction) -> Reading | None:
    return prediction.reading if isinstance(prediction, Answer) else None


def read_as(predictions: Sequence[Prediction], name: str) -> list[Prediction]:
    """The predictions with a reading of :data:`READINGS` as their confidence.

    Empty if the readings are not known, or cover less than 95% of the probability of all confidences.
    """
    if name == "draw":
        return list(predictions)
    known = [(p, reading) for p in predictions if (reading := _reading(p)) is not None]
    if not known or sum(reading.confidence_mass for _, reading in known) < _LEAST_MASS * len(known):
        return []
    column = {"greedy": "greedy_confidence", "expectation": "expected_confidence"}[name]
    return [replace(p, confidence=getattr(reading, column)) for p, reading in known]
