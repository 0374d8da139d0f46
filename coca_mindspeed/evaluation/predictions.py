"""Predictions: the JSON Lines format shared by all methods, engines and evaluators.

A line is ``{"id", "dataset", "question", "response", "confidence", "correct", "tokens_to_confidence"}`` plus the
optional fields of :class:`Prediction`.  ``confidence`` is null where the response states no valid one; ``correct`` is
null where the answer could not be graded.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from coca_mindspeed.algorithm.parsing import ResponseParser
from coca_mindspeed.errors import DataError
from coca_mindspeed.utils.files import read_json_lines, write_json_lines

CATEGORIES = ("math", "code", "factual")
# The metric of a validation that counts the answers which the other metrics leave out.
UNGRADABLE_SHARE = "ungradable_share"


@dataclass(frozen=True, slots=True)
class Prediction:
    """One graded response.

    Attributes:
        id: the question's id within its data set.
        question: the bare question.
        response: the whole response, confidence included.
        confidence: in [0, 1], or None if the response states no valid confidence.
        correct: the grader's verdict; None if the answer is ungradable, which excludes it from every metric.
        tokens_to_confidence: tokens generated until the confidence was known (TTC); None if unknown.
        category: ``math``, ``code``, ``factual`` or the user's own; None: the data set's.
        method: ``coca``, ``rlvr+probe``, ...
        model: name of the base model or checkpoint.
        tokens: length of the response in tokens.
        sample: number of the sample among several samples of one question, from 0.
        gold: the gold answer, shown in reports.
        seed: the sampling seed.
    """

    id: str
    dataset: str
    question: str
    response: str
    confidence: float | None
    correct: bool | None
    tokens_to_confidence: int | None
    category: str | None = None
    method: str | None = None
    model: str | None = None
    tokens: int | None = None
    sample: int = 0
    gold: str | None = None
    seed: int | None = None

    @property
    def key(self) -> tuple[str, str, int]:
        """Identifies a prediction within one run of one method."""
        return self.dataset, self.id, self.sample

    @property
    def outcome(self) -> str:
        """``right``, ``wrong`` or ``ungradable``."""
        return "ungradable" if self.correct is None else "right" if self.correct else "wrong"


_FIELDS = {f.name: f.default for f in fields(Prediction)}
_REQUIRED = tuple(_FIELDS)[:7]
_OPTIONAL = tuple(_FIELDS)[7:]


def _is_integer(value: Any, lowest: float = -math.inf) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= lowest


def is_confidence(value: Any) -> bool:
    """Whether a JSON value is a number from 0 to 1, which NaN is not."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1


# Field -> expected value and test; a text with "null" also allows null.
_CHECKS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    **{name: ("text", lambda v: isinstance(v, str)) for name in ("id", "dataset", "question", "response")},
    **{name: ("text or null", lambda v: isinstance(v, str)) for name in ("category", "method", "model", "gold")},
    "correct": ("true, false, or null for an ungradable answer", lambda v: isinstance(v, bool)),
    "confidence": ("null or a number from 0 to 1", is_confidence),
    "sample": ("a whole number from 0", lambda v: _is_integer(v, 0)),
    "tokens_to_confidence": ("null or a whole number from 0", lambda v: _is_integer(v, 0)),
    "tokens": ("null or a whole number from 0", lambda v: _is_integer(v, 0)),
    "seed": ("null or a whole number", _is_integer),
}


def prediction_from_json(row: Mapping[str, Any], where: str) -> Prediction:
    """Build a prediction from a JSON object; ``where`` (``file:line``) is for messages.

    Raises DataError if a field is missing, unknown, of the wrong type or out of range.
    """
    if missing := [name for name in _REQUIRED if name not in row]:
        raise DataError(f"{where}: field {missing[0]!r} is missing; a prediction has {', '.join(_REQUIRED)}")
    if unknown := sorted(set(row) - set(_FIELDS)):
        raise DataError(f"{where}: unknown field {unknown[0]!r}; the optional ones are {', '.join(_OPTIONAL)}")
    for name, value in row.items():
        expected, holds = _CHECKS[name]
        if not (holds(value) or (value is None and "null" in expected)):
            raise DataError(f"{where}: field {name!r} should be {expected}, found {value!r:.80}")
    confidence = row["confidence"]
    return Prediction(**{**row, "confidence": None if confidence is None else float(confidence)})


def read_predictions(path: Path) -> list[Prediction]:
    """Read a file; (data set, id, sample) must be unique for each model and method in it.

    Raises DataError with file and line for anything that is not a prediction, and if there are none.
    """
    rows: list[Prediction] = []
    seen: dict[tuple[object, ...], int] = {}
    for number, row in read_json_lines(path):
        prediction = prediction_from_json(row, f"{path}:{number}")
        key = (prediction.model, prediction.method, *prediction.key)
        if key in seen:
            raise DataError(
                f"{path}:{number}: id {prediction.id!r} of {prediction.dataset}, sample {prediction.sample}, was "
                f"already on line {seen[key]}; number several samples of a question by 'sample'"
            )
        seen[key] = number
        rows.append(prediction)
    if not rows:
        raise DataError(f"{path}: holds no predictions; expected at least one JSON line")
    return rows


def prediction_to_json(prediction: Prediction) -> dict[str, Any]:
    """Return the JSON object of a prediction, without optional fields that have their default."""
    row = {name: getattr(prediction, name) for name in _REQUIRED}
    for name in _OPTIONAL:
        if (value := getattr(prediction, name)) != _FIELDS[name]:
            row[name] = value
    return row


def write_predictions(path: Path, predictions: Iterable[Prediction]) -> None:
    """Write predictions atomically as JSON Lines."""
    write_json_lines(path, (prediction_to_json(prediction) for prediction in predictions))


@dataclass(frozen=True, slots=True)
class Outcomes:
    """Arrays of n predictions for the metrics.

    Attributes:
        confidence: float64 (n,), NaN where invalid.
        correct: bool (n,).
        tokens_to_confidence: float64 (n,), NaN where unknown.
    """

    confidence: npt.NDArray[np.float64]
    correct: npt.NDArray[np.bool_]
    tokens_to_confidence: npt.NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.correct)


def gradable(predictions: Iterable[Prediction]) -> list[Prediction]:
    """Return the predictions whose answers could be graded; every metric is over these."""
    return [prediction for prediction in predictions if prediction.correct is not None]


def outcomes(predictions: Iterable[Prediction]) -> Outcomes:
    """Return the arrays of the :func:`gradable` predictions, in their order."""
    predictions = gradable(predictions)
    # NumPy reads None as NaN.
    return Outcomes(
        np.array([p.confidence for p in predictions], dtype=np.float64),
        np.array([p.correct for p in predictions], dtype=np.bool_),
        np.array([p.tokens_to_confidence for p in predictions], dtype=np.float64),
    )


def answers_first(predictions: Iterable[Prediction]) -> bool:
    """Whether a confidence is stated behind its answer; a proxy cannot route by it."""
    first, last = ResponseParser("first"), ResponseParser("last")
    return any(
        p.confidence is not None and first(p.response).confidence is None and last(p.response).confidence is not None
        for p in predictions
    )
