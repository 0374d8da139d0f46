"""Predictions: the JSON Lines format shared by all methods, engines and evaluators.

A line is ``{"id", "dataset", "question", "response", "confidence", "correct", "tokens_to_confidence"}`` plus the
optional fields of :class:`Prediction`.  ``confidence`` is null where the response states no valid one; ``correct`` is
null where the answer could not be graded.

Files from elsewhere need ``id``, ``confidence`` and ``correct`` only, and may be CSV, Parquet or a JSON array with
columns of any names.
"""

import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from coca_mindspeed.algorithm.parsing import ResponseParser
from coca_mindspeed.data.formats import file_format, read_rows
from coca_mindspeed.data.records import scalar_text
from coca_mindspeed.errors import DataError, did_you_mean
from coca_mindspeed.utils.console import one_line, print_note
from coca_mindspeed.utils.json_files import read_json_lines, write_json_lines

# The metric of a validation that counts the answers which the other metrics leave out.
UNGRADABLE_SHARE = "ungradable_share"


@dataclass(frozen=True, slots=True)
class Prediction:
    """One graded response."""

    id: str  # of the question within its data set
    dataset: str
    question: str  # bare
    response: str  # whole, confidence included
    confidence: float | None  # in [0, 1]; None: the response states no valid one
    correct: bool | None  # the grader's verdict; None: ungradable, which excludes it from every metric
    tokens_to_confidence: int | None  # tokens generated until the confidence was known (TTC); None: unknown
    category: str | None = None  # ``math``, ``code``, ``factual`` or the user's own; None: the data set's
    method: str | None = None  # ``coca``, ``rlvr+probe``, ...
    model: str | None = None  # name of the base model or checkpoint
    tokens: int | None = None  # length of the response
    sample: int = 0  # number among several samples of one question
    gold: str | None = None  # the gold answer, shown in reports
    seed: int | None = None  # of the sampling
    confidence_after: float | None = None  # after the answer, of a method that states two; None: none, or not valid
    answer_probability: float | None = None  # geometric mean of the probabilities of the answer's tokens
    form: str | None = None  # digest of its prompt's form (:meth:`.PromptForm.digest`); None: unknown

    @property
    def key(self) -> tuple[str, str, int]:
        """Identifies a prediction within one run of one method."""
        return self.dataset, self.id, self.sample

    @property
    def outcome(self) -> str:
        """``right``, ``wrong`` or ``ungradable``."""
        return "ungradable" if self.correct is None else "right" if self.correct else "wrong"


_FIELDS = {f.name: f.default for f in fields(Prediction)}
_WRITTEN = tuple(_FIELDS)[:7]  # in every line of ours
_OPTIONAL = tuple(_FIELDS)[7:]
_REQUIRED = ("id", "confidence", "correct")
#: Columns of plain responses that are read by another name.
RESPONSE_ALIASES = {"prediction": "response", "answer": "gold"}
_MISSPELLED = 0.8  # similarity; of "model" and "model_name" it is .67
#: The data set of rows that name none.  One name for all files: predictions are paired by data set.
WITHOUT_DATASET = "all"
# Values of fields that a file from elsewhere may lack.
_ABSENT = {"dataset": WITHOUT_DATASET, "question": "", "response": "", "tokens_to_confidence": None}


def _is_integer(value: Any, lowest: float = -math.inf) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= lowest


def is_confidence(value: Any) -> bool:
    """Whether a JSON value is a number from 0 to 1, which NaN is not."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1


_TEXT_FIELDS = ("id", "dataset", "question", "response")
_FRACTIONS = ("confidence", "confidence_after", "answer_probability")
# Field -> expected value and test; a text with "null" also allows null.
_CHECKS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    **dict.fromkeys(_TEXT_FIELDS, ("text", lambda v: isinstance(v, str))),
    **dict.fromkeys(("category", "method", "model", "gold", "form"), ("text or null", lambda v: isinstance(v, str))),
    "correct": ("true, false, 0, 1, or null for an ungradable answer", lambda v: isinstance(v, bool)),
    **dict.fromkeys(_FRACTIONS, ("null or a number from 0 to 1", is_confidence)),
    "sample": ("a whole number from 0", lambda v: _is_integer(v, 0)),
    **dict.fromkeys(("tokens_to_confidence", "tokens"), ("null or a whole number from 0", lambda v: _is_integer(v, 0))),
    "seed": ("null or a whole number", _is_integer),
}


def prediction_columns(columns: Mapping[str, Any]) -> dict[str, str]:
    """Check a mapping of the fields of a prediction to columns.

    Raises ValueError if a field is unknown, or a column is no text.
    """
    for name, column in columns.items():
        if name not in _FIELDS:
            raise ValueError(f"{name}: no such field{did_you_mean(name, _FIELDS)}; expected {', '.join(_FIELDS)}")
        if not isinstance(column, str):
            raise ValueError(f"{name}: expected the name of a column, found {column!r:.80}")
    return dict(columns)


def prediction_from_json(
    row: Mapping[str, Any], where: str, needs: Collection[str] = (), *, number: int | None = None
) -> Prediction:
    """Build a prediction from a JSON object; ``where`` (``file:line``) is for messages.

    ``needs`` names fields that must be there besides ``id``, ``confidence`` and ``correct``; ``number`` is the id of a
    row that need not have one.  ``id`` may be an integer, and ``correct`` 0 or 1.  Unknown fields are ignored, unless
    they are misspelled.

    Raises DataError if a field is missing, misspelled, of the wrong type or out of range.
    """
    required = (*(name for name in _REQUIRED if name != "id" or number is None), *needs)
    if missing := [name for name in required if name not in row]:
        raise DataError(f"{where}: {_missing(missing, row)}")
    absent = [name for name in _FIELDS if name not in row]
    for name in row:
        if name not in _FIELDS and (near := did_you_mean(name, absent, _MISSPELLED)):
            raise DataError(f"{where}: unknown field {name!r}{near}; the known ones are {', '.join(_FIELDS)}")
    values = {name: value for name, value in row.items() if name in _FIELDS}
    if number is not None:
        values["id"] = number
    if _is_integer(values["id"]):
        values["id"] = str(values["id"])
    for name in values.keys() & {"response", "gold"}:
        with suppress(ValueError):  # refused below
            values[name] = scalar_text(values[name])
    if isinstance(values["correct"], int | float) and values["correct"] in (0, 1):
        values["correct"] = bool(values["correct"])
    for name, value in values.items():
        expected, holds = _CHECKS[name]
        if not (holds(value) or (value is None and "null" in expected)):
            fix = _fraction_hint(value) if name in _FRACTIONS else ""
            raise DataError(f"{where}: field {name!r} should be {expected}, found {value!r:.80}{fix}")
    confidence = values["confidence"]
    return Prediction(**{**_ABSENT, **values, "confidence": None if confidence is None else float(confidence)})


def _fraction_hint(value: Any) -> str:
    """How to correct a percentage, or a number that is written as text."""
    match = _FRACTION_TEXT.fullmatch(str(value).strip())
    if match is None or isinstance(value, bool) or not 0 <= (number := float(match["number"])) <= 100:
        return ""
    if match["percent"] or number > 1:
        return f"; {number:g}{match['percent'] or ''} looks like percent: divide the column by 100"
    return f"; write the number {number:g} without quotes"


def _missing(names: Sequence[str], row: Mapping[str, Any]) -> str:
    """Why a row that lacks the fields ``names`` is no prediction."""
    unknown, found = [name for name in row if name not in _FIELDS], ", ".join(map(repr, row)) or "nothing"
    if "correct" in names:
        wanted = ("correct", "response", "prediction")
        near = next((f"; {name!r}{near}" for name in unknown if (near := did_you_mean(name, wanted))), "")
        if responses := [name for name in wanted if name in row]:
            fix = "`coca-mindspeed evaluate FILE --output DIR` writes DIR/predictions.jsonl with verdicts"
            near = f"; {responses[0]!r} is not graded here: {fix}"
        return f"has no verdict: expected 'correct', or a 'response' (or 'prediction') to grade; found {found}{near}"
    near = did_you_mean(names[0], unknown)
    columns = f'; a column of another name is read by evaluate --columns \'{{"{names[0]}": "COLUMN"}}\''
    return f"field {names[0]!r} is missing{near}; the row has {found}{columns}"


def read_predictions(
    path: Path, needs: Collection[str] = (), columns: Mapping[str, str] | None = None, *, numbered: bool = False
) -> list[Prediction]:
    """Read a file; (data set, id, sample) must be unique for each model and method in it.

    ``needs`` names fields that each row must have besides ``id``, ``confidence`` and ``correct``.  ``columns`` maps
    fields to columns whose names differ.  ``numbered``: in a file without ``id``, the number of a row is its id.

    CSV, TSV, Parquet and JSON arrays are read by their suffix, every other file as JSON Lines.

    Raises DataError with file and line (row, if the format has no lines) for anything that is not a prediction, and if
    there are none.
    """
    if path.is_dir():
        found = ", ".join(map(str, sorted(path.glob("predictions*.jsonl"))))
        raise DataError(f"{path}: is a directory; expected a file of predictions{f', such as {found}' * bool(found)}")
    rows: list[Prediction] = []
    seen: dict[tuple[object, ...], str] = {}
    ignored: set[str] = set()
    without_id = False
    for number, (where, row) in enumerate(rows_by_field(path, columns)):
        without_id = without_id or (numbered and not number and "id" not in row)
        if without_id and "id" in row:
            raise DataError(f"{where}: has an 'id', and the first row has none; give all rows an id, or no row")
        prediction = prediction_from_json(row, where, needs, number=number if without_id else None)
        key = (prediction.model, prediction.method, *prediction.key)
        if key in seen:
            raise DataError(
                f"{where}: id {prediction.id!r} of {prediction.dataset}, sample {prediction.sample}, was already in "
                f"{seen[key]}; number several samples of a question by 'sample'"
            )
        seen[key] = where
        ignored.update(row)
        rows.append(prediction)
    if not rows:
        raise DataError(f"{path}: holds no predictions; expected at least one row")
    note_ignored(path, ignored)
    return rows


def note_ignored(path: Path, names: Iterable[str], used: Iterable[str] = _FIELDS) -> None:
    """Print which of the ``names`` of a file's columns are not ``used``; default: are no fields of a prediction."""
    if ignored := sorted(str(name) for name in {*names} - {*used}):
        print_note(f"{path}: fields without effect: {one_line(', '.join(ignored))}")


def rows_by_field(path: Path, columns: Mapping[str, str] | None = None) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield ``(file:line, values)`` of a file, with values as in JSON, and those of ``columns`` by their field.

    A column that ``columns`` does not name keeps its name, unless another one is named for that field.  A row of JSON
    may lack columns.

    Raises DataError if the file cannot be read, or has no such column.
    """
    form = file_format(path)
    typed = {".csv": _from_text, ".tsv": _from_text, ".parquet": _nan_to_none}
    convert = typed.get(form or "", lambda _, value: value)
    for where, values in _renamed(path, list(_raw_rows(path)), columns) if columns else _raw_rows(path):
        yield where, {name: convert(name, value) for name, value in values.items()}


def _raw_rows(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    if file_format(path) in (None, ".jsonl"):
        yield from ((f"{path}:{number}", values) for number, values in read_json_lines(path))
        return
    for row in read_rows(path):
        if row.error:
            raise DataError(f"{row.where}: {row.error}")
        yield row.where, row.values


def _renamed(
    path: Path, rows: Sequence[tuple[str, Mapping[str, Any]]], columns: Mapping[str, str]
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    names = dict.fromkeys(name for _, values in rows for name in values)
    if rows and (absent := [column for column in columns.values() if column not in names]):
        near = did_you_mean(absent[0], names)
        raise DataError(f"{path}: has no column {absent[0]!r}{near}; its columns are {', '.join(map(repr, names))}")
    taken = {*columns, *columns.values()}
    for where, values in rows:
        named = {name: values[column] for name, column in columns.items() if column in values}
        yield where, named | {name: value for name, value in values.items() if name not in taken}


# float() would also take 1_0 and the digits of other scripts.
_DECIMAL = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
_FRACTION_TEXT = re.compile(rf"(?P<number>{_DECIMAL.pattern}) ?(?P<percent>%)?")
_WHOLE = re.compile(r"[0-9]{1,18}")  # int() refuses texts of thousands of digits


def _from_text(name: str, text: str) -> Any:
    """The value of a CSV field: an empty one is null; a text that is no value of its field is left to the check."""
    expected = _CHECKS[name][0] if name in _CHECKS else "text"
    if name in _TEXT_FIELDS or name in RESPONSE_ALIASES:
        return text
    if not text.strip():
        return None
    if expected.startswith("text"):
        return text
    if name == "correct" and text.strip().lower() in ("true", "false"):
        return text.strip().lower() == "true"
    if not _DECIMAL.fullmatch(text.strip()):
        return text
    is_whole = name not in ("confidence", "correct") and _WHOLE.fullmatch(text.strip())
    return int(text) if is_whole else float(text)


def _nan_to_none(name: str, value: Any) -> Any:
    """Read NaN as null, and whole floats as integers: pandas writes a column with missing numbers as floats."""
    if not isinstance(value, float):
        return value
    if math.isnan(value):
        return None
    return int(value) if name not in ("confidence", "correct") and value.is_integer() else value


def prediction_to_json(prediction: Prediction) -> dict[str, Any]:
    """Return the JSON object of a prediction, without optional fields that have their default."""
    row = {name: getattr(prediction, name) for name in _WRITTEN}
    for name in _OPTIONAL:
        if (value := getattr(prediction, name)) != _FIELDS[name]:
            row[name] = value
    return row


def write_predictions(path: Path, predictions: Iterable[Prediction]) -> None:
    """Write predictions atomically as JSON Lines."""
    write_json_lines(path, (prediction_to_json(prediction) for prediction in predictions))


#: The folder of a run on a cluster, or of its stage, with the predictions of each validation.
VALIDATIONS = "validation"


def validation_file(folder: Path, step: int) -> Path:
    """Return the file of the predictions of a validation after ``step`` steps."""
    return folder / f"predictions_step_{step:06d}.jsonl"


def validation_files(folder: Path) -> dict[int, Path]:
    """Return the files that :func:`validation_file` names by step, in the order of the steps."""
    found = {int(path.stem.rpartition("_")[2]): path for path in folder.glob("predictions_step_*.jsonl")}
    return dict(sorted(found.items()))


@dataclass(frozen=True, slots=True)
class GradedPredictions:
    """Arrays ``[n]`` of n predictions for the metrics."""

    confidence: npt.NDArray[np.float64]  # NaN where invalid
    correct: npt.NDArray[np.bool_]
    tokens_to_confidence: npt.NDArray[np.float64]  # NaN where unknown

    def __len__(self) -> int:
        return len(self.correct)


def gradable(predictions: Iterable[Prediction]) -> list[Prediction]:
    """Return the predictions whose answers could be graded; every metric is over these."""
    return [prediction for prediction in predictions if prediction.correct is not None]


def outcomes(predictions: Iterable[Prediction]) -> GradedPredictions:
    """Return the arrays of the :func:`gradable` predictions, in their order."""
    predictions = gradable(predictions)
    # NumPy reads None as NaN.
    return GradedPredictions(
        np.array([p.confidence for p in predictions], dtype=np.float64),
        np.array([p.correct for p in predictions], dtype=np.bool_),
        np.array([p.tokens_to_confidence for p in predictions], dtype=np.float64),
    )


def answers_first(predictions: Iterable[Prediction]) -> bool:
    """Whether a confidence is stated behind its answer; a proxy cannot route by it."""
    first, last = ResponseParser("first", thinking=True), ResponseParser("last")  # thoughts are optional for the first
    return any(
        p.confidence is not None and first(p.response).confidence is None and last(p.response).confidence is not None
        for p in predictions
    )
