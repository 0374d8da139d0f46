"""Readers of rows: JSON arrays are read whole; Parquet, JSON Lines, CSV, TSV and the hub are streamed."""

import csv
import io
import json
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from coca_mindspeed.errors import DataError
from coca_mindspeed.utils.packages import require
from coca_mindspeed.utils.text_formats import (
    DEEPEST,
    JsonError,
    check_depth,
    line_bound,
    numbered_lines,
    open_bytes,
    parse_json,
)

# TriviaQA's own files are one object whose first key holds the rows.
_ARRAY = re.compile(r'\s*(?:\{\s*"(?:Data|data|rows|examples)"\s*:\s*)?\[')
SUFFIXES = (".parquet", ".jsonl", ".json", ".csv", ".tsv")
_UNKNOWN_SUFFIX = f"unknown suffix; expected one of {', '.join(SUFFIXES)}, text formats also with .gz"
_ROWS_PER_BATCH = 256  # TACO's rows reach megabytes


@dataclass(frozen=True, slots=True)
class Row:
    """A row of a data file, or the ``error`` why it cannot be read.

    ``number`` is the line in JSON Lines, otherwise the row, from 1 (a CSV header is not a row).  ``line`` is the
    file's where the row begins, 0 if the format has no lines.  ``columns`` are those of a columnar file, also the
    columns that were not read; other rows have the columns of their ``values``.
    """

    file: str
    number: int
    values: Mapping[str, Any] = field(default_factory=dict)
    error: str = ""
    columns: Collection[str] = ()
    line: int = 0

    @property
    def where(self) -> str:
        """``file:line``, or ``file: row number``, for messages."""
        return f"{self.file}:{self.line}" if self.line else f"{self.file}: row {self.number}"


def data_files(inputs: Sequence[Path]) -> list[Path]:
    """Return the given files, and the data files of the given directories in name order.

    Raises DataError if an input is missing, a directory holds no data file, or a suffix is unknown.
    """
    files: list[Path] = []
    for path in inputs:
        if path.is_dir():
            found = sorted(child for child in path.iterdir() if child.is_file() and file_format(child) is not None)
            if not found:
                raise DataError(f"{path}: no data file in this directory; expected {', '.join(SUFFIXES)} (or .gz)")
            files += found
        elif not path.exists():
            raise DataError(f"{path}: no such file or directory")
        elif file_format(path) is None:
            raise DataError(f"{path}: {_UNKNOWN_SUFFIX}")
        else:
            files.append(path)
    return files


def file_format(path: Path) -> str | None:
    """Return the suffix without ``.gz``, or None if it is not one of :data:`SUFFIXES`."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    zipped = suffixes[-1:] == [".gz"]
    suffix = suffixes[-2:-1] if zipped else suffixes[-1:]
    if not suffix or suffix[0] not in SUFFIXES or (zipped and suffix[0] == ".parquet"):
        return None
    return suffix[0]


def read_rows(path: Path, columns: Collection[str] | None = None) -> Iterator[Row]:
    """Stream the rows of a file of :func:`data_files`.

    ``columns`` restricts Parquet files.  Their numbers become JSON's: see :func:`_as_json`.

    Raises DataError: the file cannot be read, or not any further.
    """
    form = file_format(path)
    try:
        if form == ".parquet":
            yield from _parquet_rows(path, columns)
        elif form == ".jsonl":
            yield from _json_lines(path)
        elif form == ".json":
            yield from _json_rows(path)
        elif form in (".csv", ".tsv"):
            yield from _csv_rows(path, "," if form == ".csv" else "\t")
        else:
            raise DataError(f"{path}: {_UNKNOWN_SUFFIX}")
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error


@contextmanager
def _open_text(path: Path, newline: str | None = None) -> Iterator[TextIO]:
    with open_bytes(path) as file, io.TextIOWrapper(file, encoding="utf-8-sig", newline=newline) as text:
        yield text


def _parquet_rows(path: Path, columns: Collection[str] | None) -> Iterator[Row]:
    require("pyarrow", purpose=str(path))
    import pyarrow as pa
    import pyarrow.parquet as pq

    number = 0
    try:
        file = pq.ParquetFile(path)
        names, convert = file.schema_arrow.names, _as_json(file.schema_arrow)
        _refuse_repeated(path, names)
        chosen = None if columns is None else [name for name in names if name in columns]
        for batch in file.iter_batches(batch_size=_ROWS_PER_BATCH, columns=chosen):
            for values in batch.to_pylist():
                number += 1
                yield Row(str(path), number, convert(values), columns=names)
    except pa.ArrowException as error:
        raise DataError(f"{path}: cannot be read beyond row {number}: {error}") from error


_Converter = Callable[[Any], Any]


def _as_json(fields: Any) -> _Converter:
    """Return the conversion of a row's numbers into those of JSON, by the types of its columns.

    A float16 or float32 becomes the number with its shortest decimal, 0.3 and not 0.30000001192092896; a decimal an
    int or a float.  ``fields`` is a schema or the type of a struct.
    """
    known = {field.name: convert for field in fields if (convert := _number_as_json(field.type)) is not None}
    return lambda row: {name: known[name](value) if name in known else value for name, value in row.items()}


def _number_as_json(kind: Any) -> _Converter | None:
    """The conversion of a column's values; None if it holds no such numbers."""
    import pyarrow as pa

    if pa.types.is_dictionary(kind):
        return _number_as_json(kind.value_type)
    if pa.types.is_float16(kind) or pa.types.is_float32(kind):
        narrow = np.float16 if pa.types.is_float16(kind) else np.float32
        return _unless_null(lambda value: float(str(narrow(value))))
    if pa.types.is_decimal(kind):
        return _unless_null(lambda value: int(value) if value == value.to_integral_value() else float(value))
    if pa.types.is_struct(kind):
        return _unless_null(_as_json(kind))
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        convert = _number_as_json(kind.value_type)
        return None if convert is None else _unless_null(lambda values: [convert(value) for value in values])
    return None


def _unless_null(convert: _Converter) -> _Converter:
    return lambda value: None if value is None else convert(value)


def _json_lines(path: Path) -> Iterator[Row]:
    with open_bytes(path) as file:
        for number, line in numbered_lines(file):
            if line is None:
                yield Row(str(path), number, error=line_bound(), line=number)
            elif line.strip():
                yield replace(_json_row(str(path), number, line), line=number)


def _json_row(file: str, number: int, line: bytes) -> Row:
    try:
        # Lone surrogates are reported where the row is written.
        return _object_row(file, number, parse_json(line.decode("utf-8"), surrogates=True))
    except (UnicodeDecodeError, JsonError) as error:
        return Row(file, number, error=f"expected one JSON object a line; {error}")


def _object_row(file: str, number: int, value: Any) -> Row:
    if not isinstance(value, dict):
        return Row(file, number, error=f"expected a JSON object, found {type(value).__name__}")
    return Row(file, number, value)


def _json_rows(path: Path) -> Iterator[Row]:
    """Rows of ``.json``: an array or an object around an array (TriviaQA's ``Data``), read whole, or JSON Lines."""
    try:
        with _open_text(path) as file:
            head = file.read(1000)
            text = head + file.read() if _ARRAY.match(head) else ""
        value = json.loads(text) if text else None
    except RecursionError as error:
        raise DataError(f"{path}: nested more than {DEEPEST} levels deep") from error
    except json.JSONDecodeError as error:
        raise DataError(f"{path}:{error.lineno}: not a JSON array: {error.msg} at column {error.colno}") from error
    except ValueError as error:  # not UTF-8, or an integer of more than 4300 digits
        raise DataError(f"{path}: not a JSON array: {error}") from error
    if value is None:
        yield from _json_lines(path)
        return
    for number, element in enumerate(next(iter(value.values())) if isinstance(value, dict) else value, start=1):
        try:
            check_depth(element, text)
            yield _object_row(str(path), number, element)
        except JsonError as error:
            yield Row(str(path), number, error=str(error))


def _refuse_repeated(path: Path, names: Sequence[str]) -> None:
    """Raise DataError if two columns have one name, of which a row could hold one only."""
    if repeated := next((name for name in names if name and names.count(name) > 1), None):
        places = ", ".join(str(at) for at, name in enumerate(names, start=1) if name == repeated)
        raise DataError(f"{path}: column {repeated!r} is there more than once (columns {places}); rename all but one")


_SEPARATORS = {";": "semicolons", "\t": "tabs", "|": "vertical bars", ",": "commas"}


def _refuse_other_separator(path: Path, header: str, separator: str) -> None:
    """Raise DataError if a header of one name looks like several names with another separator."""
    for other, name in _SEPARATORS.items():
        if other != separator and other in header:
            fix = "name it .tsv" if other == "\t" else "save it as .csv with commas, and with points in decimals (0.5)"
            raise DataError(f"{path}: its header {header!r:.80} is separated by {name}; {fix}")


def _csv_rows(path: Path, separator: str) -> Iterator[Row]:
    csv.field_size_limit(sys.maxsize)
    number = last = 0  # row, and the last line that was read
    try:
        with _open_text(path, newline="") as file:
            reader = csv.reader(file, delimiter=separator, strict=True)
            if (names := next(reader, None)) is None:
                raise DataError(f"{path}: empty; expected a header line")
            _refuse_repeated(path, names)
            if len(names) == 1:
                _refuse_other_separator(path, names[0], separator)
            last = reader.line_num
            for fields in reader:
                first, last = last + 1, reader.line_num  # a quoted field may hold line breaks
                if not fields:
                    continue
                number += 1
                if len(fields) != len(names):
                    problem = f"expected {len(names)} columns, found {len(fields)}"
                    yield Row(str(path), number, error=problem, line=first)
                else:
                    yield Row(str(path), number, dict(zip(names, fields, strict=True)), line=first)
    except (csv.Error, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read beyond line {last}: {error}") from error


@dataclass(frozen=True, slots=True)
class HubDataset:
    """Location of a data set on the Hugging Face hub."""

    repository: str
    configuration: str | None
    split: str


def hub_rows(dataset: HubDataset, columns: Collection[str] | None = None) -> Iterator[Row]:
    """The rows of a data set of the hub; a row's ``file`` is its name there.

    ``datasets`` downloads it to its cache, with its own progress bars.

    Raises:
        MissingDependencyError: ``datasets`` is not installed.
        DataError: the hub or the data set cannot be reached.
    """
    require("datasets", purpose="data sets of the hub (files downloaded from it need no package)")
    import datasets

    name = "/".join(filter(None, (dataset.repository, dataset.configuration, dataset.split)))
    number = 0
    try:
        found = datasets.load_dataset(dataset.repository, dataset.configuration, split=dataset.split)
        names, convert = found.column_names, _as_json(found.features.arrow_schema)
        if columns is not None:
            found = found.select_columns([column for column in names if column in columns])
        for number, values in enumerate(found, start=1):
            yield Row(name, number, convert(values), columns=names)
    # datasets, huggingface_hub, requests and fsspec each raise their own kinds when there is no network.
    except Exception as error:
        raise DataError(
            f"{name}: cannot be read from the hub beyond row {number}: {type(error).__name__}: {str(error)[:300]}; "
            "without network access, name downloaded files instead (--input)"
        ) from error
