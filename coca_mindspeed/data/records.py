"""The record type of all data sets, and its JSON Lines form."""

import hashlib
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from decimal import Decimal
from pathlib import Path
from typing import Any

from coca_mindspeed.errors import DataError, did_you_mean
from coca_mindspeed.utils.json_files import read_json_lines, write_json_lines

#: Of a record; each has a grader of its name.
CATEGORIES = ("math", "code", "factual")


@dataclass(frozen=True, slots=True)
class Record:
    """A question and the data needed to grade an answer.

    Attributes:
        id: unique within its data set.
        category: ``math``, ``code`` or ``factual`` in the paper's tables.
        question: the bare question, without system prompt or answer instruction.
        answer: the gold answer; empty where tests in ``metadata`` decide (code).
        system: a system prompt of its own, which follows the method's (see :mod:`.prompts`); or None.
        metadata: further JSON values: ``difficulty``, ``tests``, ``aliases``, ``arithmetic`` (``3-1`` is computed), and
            ``instruction``, which replaces the category's instruction after the question (see :mod:`.prompts`).
        where: file and line that it was read from, for messages; empty if it comes from no file.  Not a field of files.
    """

    id: str
    dataset: str
    category: str
    question: str
    answer: str
    system: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    where: str = field(default="", compare=False)

    @property
    def name(self) -> str:
        """For messages: place, id and data set."""
        return f"{self.where}{': ' if self.where else ''}record {self.id!r} of {self.dataset!r}"


class RecordError(DataError):
    """A record cannot be used, because of ``problem``; the message begins with its file and line."""

    def __init__(self, record: Record, problem: str) -> None:
        super().__init__(f"{record.name}: {problem}")
        self.record, self.problem = record, problem

    def __reduce__(self) -> tuple[type["RecordError"], tuple[Record, str]]:
        return RecordError, (self.record, self.problem)


class LayoutError(DataError):
    """A row has other keys than a record; ``reason`` is the message without the remedy by ``data.columns``."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.reason}; {NAMED_COLUMNS}"


_WORD = re.compile(r"[^\W\d_]+")
_NO_WORDS = re.compile(r"[^\w\s.,;:!?'’\"()&–-]|[\d_]")  # digits and the signs of mathematics
_CONSTANT = re.compile(r"(?:[-–]|(?:positive|negative|plus|minus) )?(?:inf|infinity|undefined)\.?", re.IGNORECASE)
_FUNCTION = r"\b(?:(?:arc)?(?:sin|cos|tan|cot|sec|csc)h?|log|ln|lg|exp|sqrt|gcd|lcm|max|min|mod)(?:\s+|\s*\(\s*)[-–]?"
_GREEK = "alpha|beta|gamma|delta|epsilon|theta|lambda|mu|phi|psi|omega|pi"
_ARGUMENT = rf"(?:(?:of|base)\s+)?(?:\.?\d|[a-z](?![^\W_]|\. ?\w)|(?:{_GREEK})\b)"  # not the initial of a name
_APPLIED = re.compile(rf"(?:{_FUNCTION})+{_ARGUMENT}", re.IGNORECASE)
_MONTH_NAMES = "January February March April May June July August September October November December Sept"
_MONTH = "(?:" + "|".join(rf"{name}|{name[:3]}\.?" for name in _MONTH_NAMES.split()) + ")"
_DAY, _YEAR = r"\d{1,2}(?:st|nd|rd|th)?", r"(?:\d{3,4}|\d{1,4} ?(?:AD|BCE?|CE))"
_DATE = re.compile(
    rf"(?:\w+day,? )?(?:the )?(?:(?:{_DAY} (?:of )?)?{_MONTH}|{_MONTH} (?:the )?{_DAY})(?:(?:,| of)? {_YEAR})?\.?",
    re.IGNORECASE,
)


# 1944-06-06, 3–1, 40-60, 2025/5/22 and 192.168.0.1; the formula CO2 or the size A4, but not 2x or x2.
DASH = "[-‐‑‒–—−]{1,3}"
_JOINED = re.compile(rf"\d[\d.]*(?:\s*{DASH}\s*\d[\d.]*)+|\d+(?:\s*/\s*\d+){{2,}}|\d+(?:\.\d+){{2,}}")
_CODE = re.compile(r"(?=[A-Za-z\d]*[A-Za-z]\d)[A-Z][A-Za-z\d]*")


def joins_numbers(answer: str) -> bool:
    """Whether an answer is a date, score, range or number with several points."""
    return _JOINED.fullmatch(answer.strip()) is not None


def is_code(answer: str) -> bool:
    """Whether an answer is one word of letters and digits such as ``CO2``, ``A4`` or ``MP3``, whose case counts."""
    return _CODE.fullmatch(answer.strip()) is not None


def applies_function(text: str) -> bool:
    """Whether a text in words has a function with an argument: ``log x``, ``max(a, b)``, but not ``Max Planck``."""
    return _APPLIED.search(text) is not None


def default_category(answer: str) -> str:
    """The category of a user's record that names none: ``factual`` for words, dates and codes, otherwise ``math``."""
    answer = answer.strip()
    if _DATE.fullmatch(answer) or joins_numbers(answer) or is_code(answer):
        return "factual"
    if _NO_WORDS.search(answer) or _CONSTANT.fullmatch(answer) or applies_function(answer):
        return "math"
    # xy is a product, but two letters of a script without case, such as Chinese, are a word.
    words = (len(word) > 2 or (len(word) == 2 and word.lower() == word.upper()) for word in _WORD.findall(answer))
    return "factual" if any(words) else "math"


def scalar_text(value: Any) -> str:
    """Return a text as it is, and a number as its shortest decimal, without an exponent or a zero fraction.

    Raises ValueError with the expected and the found value for anything else, also for NaN and infinity.
    """
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError(f"text or a number, found {describe(value)}")
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"finite, found {value}")
        return format(Decimal(repr(value)), "f").removesuffix(".0") if value else "0"
    return str(value)


def describe(value: Any) -> str:
    """Return the type and the beginning of a JSON value, for messages."""
    return "null" if value is None else f"{type(value).__name__} {value!r:.80}"


_FIELDS = tuple(f.name for f in fields(Record) if f.name != "where")
_REQUIRED = ("question", "answer")
#: How a user's file gets its columns read.
NAMED_COLUMNS = "data.columns (of data prepare: --columns) names the columns to read; see docs/data.md"
_OTHER_FORMATS = "coca-mindspeed data prepare records converts CSV, Parquet and JSON arrays"


def record_to_json(record: Record) -> dict[str, Any]:
    """Return a record's fields by name; ``metadata`` is not copied."""
    return {name: getattr(record, name) for name in _FIELDS}


def record_from_json(row: Mapping[str, Any], where: str, dataset: str, number: int) -> Record:
    """Build a record from a JSON object; ``id``, ``dataset`` and ``category`` have defaults for users' own files.

    ``where`` (``file:line``) is for messages, ``number`` for the default id.  ``id`` and ``answer`` may be numbers.

    Raises:
        LayoutError: a field is missing or unknown.
        DataError: a field has the wrong type.
    """
    unknown = sorted(set(row) - set(_FIELDS))
    if missing := [name for name in _REQUIRED if name not in row]:
        found = ", ".join(map(repr, row)) or "none"
        raise LayoutError(f"{where}: field {missing[0]!r} is missing; the row has {found}")
    if unknown:
        known = f"a record has {', '.join(_FIELDS)}; put other values into 'metadata'"
        raise LayoutError(f"{where}: unknown field {unknown[0]!r}{did_you_mean(unknown[0], _FIELDS)}; {known}")
    values = {"id": f"{dataset}-{number}", "dataset": dataset, **row}
    for name in ("id", "answer"):
        try:
            values[name] = scalar_text(values[name])
        except ValueError as error:
            raise DataError(f"{where}: field {name!r} should be {error}") from error
    metadata = values.get("metadata", {})
    is_arithmetic = isinstance(metadata, Mapping) and metadata.get("arithmetic") is True
    values.setdefault("category", "math" if is_arithmetic else default_category(values["answer"]))
    for name, value in values.items():
        expected = (dict,) if name == "metadata" else (str, type(None)) if name == "system" else (str,)
        if not isinstance(value, expected):
            wanted = " or ".join("null" if t is type(None) else t.__name__ for t in expected)
            raise DataError(f"{where}: field {name!r} should be {wanted}, found {describe(value)}")
    if not values["question"].strip():
        raise DataError(f"{where}: field 'question' is empty")
    _check_metadata(values.get("metadata", {}), where)
    return Record(**values, where=where)


def _check_metadata(metadata: Mapping[str, Any], where: str) -> None:
    """Check the metadata that every reader relies on; graders check the rest."""
    if "difficulty" in metadata:
        value = metadata["difficulty"]
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
            expected = "a number from 0 to 1"
            raise DataError(f"{where}: metadata['difficulty'] should be {expected}, found {describe(value)}")
    if not isinstance(value := metadata.get("arithmetic", False), bool):
        raise DataError(f"{where}: metadata['arithmetic'] should be true or false, found {describe(value)}")
    if not isinstance(value := metadata.get("instruction", ""), str):
        raise DataError(f"{where}: metadata['instruction'] should be a string, found {describe(value)}")


def read_records(path: Path) -> Iterator[Record]:
    """Stream the records of a JSON Lines file; ids must be unique within the file.

    Raises DataError with file and line.
    """
    seen: dict[str, int] = {}
    for number, row in read_json_lines(path, surrogates=False, hint=_OTHER_FORMATS):
        record = record_from_json(row, f"{path}:{number}", dataset=path.stem, number=number)
        if record.id in seen:
            raise DataError(f"{path}:{number}: id {record.id!r} was already used on line {seen[record.id]}")
        seen[record.id] = number
        yield record


def write_records(path: Path, records: Iterable[Record]) -> None:
    """Write records atomically as JSON Lines."""
    write_json_lines(path, map(record_to_json, records))


def records_digest(records: Sequence[Record]) -> dict[str, Any]:
    """Number and SHA-256 of records, in order."""
    digest = hashlib.sha256()
    for record in records:
        digest.update(json.dumps(record_to_json(record), sort_keys=True).encode() + b"\n")
    return {"records": len(records), "sha256": digest.hexdigest()}
