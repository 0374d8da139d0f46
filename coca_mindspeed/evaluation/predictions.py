"""Predictions: the one JSON Lines format that every method, engine and evaluator meets in.

A line is ``{"id", "dataset", "question", "response", "confidence", "correct", "tokens_to_confidence"}`` and may
carry the optional fields of :class:`Prediction`; ``confidence`` is null where the response states no valid one, and
``correct`` where the answer could not be graded.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from coca_mindspeed.errors import DataError
from coca_mindspeed.utils.files import read_json_lines, write_json_lines

CATEGORIES = ("math", "code", "factual")
# The metric of a validation that counts the answers which the other metrics leave out.
UNGRADABLE_SHARE = "ungradable_share"


@dataclass(frozen=True, slots=True)
class Prediction:
    """One response, graded.

    Attributes:
        id: the question's id within its data set.
        dataset: ``gsm8k``, ``arithmetic``, ...
        question: the bare question.
        response: the whole response, confidence included.
        confidence: s in [0, 1], or None if the response states no valid confidence.
        correct: the grader's verdict on the answer; None where it is ungradable, and left out of every metric.
        tokens_to_confidence: tokens generated until the confidence was known (TTC), None where there is none or
            nobody counted.
        category: ``math``, ``code``, ``factual`` or a user's own; None where it is the data set's.
        method: ``coca``, ``rlvr+probe``, ...
        model: the base model's or checkpoint's name.
        tokens: length of the response in tokens.
        sample: which of several samples of one question this is, from 0.
        gold: the gold answer, for people who read the report.
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
        """What identifies a prediction within one run of one method."""
        return self.dataset, self.id, self.sample

    @property
    def outcome(self) -> str:
        """``right``, ``wrong`` or ``ungradable``."""
        return "ungradable" if self.correct is None else "right" if self.correct else "wrong"


_FIELDS = {f.name: f.default for f in fields(Prediction)}
_REQUIRED = tuple(_FIELDS)[:7]
_OPTIONAL = tuple(_FIELDS)[7:]
_TEXT = ("id", "dataset", "question", "response")
_OPTIONAL_TEXT = ("category", "method", "model", "gold")
_COUNTS = ("tokens_to_confidence", "tokens", "sample")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check(name: str, value: object) -> str | None:
    """What ``name`` should have been, or None where ``value`` will do."""
    if name in _TEXT:
        return None if isinstance(value, str) else "text"
    if name in _OPTIONAL_TEXT:
        return None if value is None or isinstance(value, str) else "text or null"
    if name == "correct":
        return None if value is None or isinstance(value, bool) else "true, false, or null for an ungradable answer"
    if name == "confidence":
        # A comparison with NaN is false, so NaN is refused as well.
        ok = value is None or (_is_number(value) and 0 <= value <= 1)  # type: ignore[operator]  # _is_number says so
        return None if ok else "null or a number from 0 to 1"
    if name == "sample":
        return None if _is_integer(value) and value >= 0 else "a whole number from 0"  # type: ignore[operator]
    if name in _COUNTS:
        ok = value is None or (_is_integer(value) and value >= 0)  # type: ignore[operator]  # _is_integer says so
        return None if ok else "null or a whole number from 0"
    return None if value is None or _is_integer(value) else "null or a whole number"


def prediction_from_json(row: Mapping[str, Any], where: str) -> Prediction:
    """Build a prediction from a JSON object.

    Args:
        row: the object.
        where: ``file:line``, for messages.

    Raises:
        DataError: a field is missing, unknown, of the wrong type or out of range.
    """
    if missing := [name for name in _REQUIRED if name not in row]:
        raise DataError(f"{where}: field {missing[0]!r} is missing; a prediction has {', '.join(_REQUIRED)}")
    if unknown := sorted(set(row) - set(_FIELDS)):
        raise DataError(f"{where}: unknown field {unknown[0]!r}; the optional ones are {', '.join(_OPTIONAL)}")
    for name, value in row.items():
        if (expected := _check(name, value)) is not None:
            raise DataError(f"{where}: field {name!r} should be {expected}, found {value!r:.80}")
    confidence = row["confidence"]
    return Prediction(**{**row, "confidence": None if confidence is None else float(confidence)})


def stream_predictions(path: Path) -> Iterator[Prediction]:
    """Stream the predictions of a file; (data set, id, sample) must be unique for each model and method in it.

    Raises:
        DataError: with file and line, for anything that is not a prediction.
    """
    seen: dict[tuple[object, ...], int] = {}
    for number, row in read_json_lines(path):
        prediction = prediction_from_json(row, f"{path}:{number}")
        key = (prediction.model, prediction.method, *prediction.key)
        if key in seen:
            raise DataError(
                f"{path}:{number}: id {prediction.id!r} of {prediction.dataset}, sample {prediction.sample}, was "
                f"already on line {seen[key]}; several samples of a question are told apart by 'sample'"
            )
        seen[key] = number
        yield prediction


def read_predictions(path: Path) -> list[Prediction]:
    """All predictions of a file.

    Raises:
        DataError: as :func:`stream_predictions`, or the file holds none.
    """
    rows = list(stream_predictions(path))
    if not rows:
        raise DataError(f"{path}: holds no predictions; expected at least one JSON line")
    return rows


def prediction_to_json(prediction: Prediction) -> dict[str, Any]:
    """The JSON object of a prediction; optional fields that have their default are left out."""
    row = {name: getattr(prediction, name) for name in _REQUIRED}
    for name in _OPTIONAL:
        if (value := getattr(prediction, name)) != _FIELDS[name]:
            row[name] = value
    return row


def write_predictions(path: Path, predictions: Iterable[Prediction]) -> None:
    """Write predictions atomically as JSON Lines that :func:`read_predictions` reads back unchanged."""
    write_json_lines(path, (prediction_to_json(prediction) for prediction in predictions))


@dataclass(frozen=True, slots=True)
class Outcomes:
    """What the metrics need of n predictions.

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
    """The predictions whose answers could be graded: those that every metric is over."""
    return [prediction for prediction in predictions if prediction.correct is not None]


def outcomes(predictions: Iterable[Prediction]) -> Outcomes:
    """The arrays that the metrics take: of the :func:`gradable` predictions, in their order."""
    nan = float("nan")
    predictions = gradable(predictions)
    return Outcomes(
        np.array([nan if p.confidence is None else p.confidence for p in predictions], dtype=np.float64),
        np.array([p.correct for p in predictions], dtype=np.bool_),
        np.array(
            [nan if p.tokens_to_confidence is None else p.tokens_to_confidence for p in predictions], dtype=np.float64
        ),
    )
