"""Records on disk with random access, so that a data set is cleaned and shuffled without being held in memory."""

import json
from array import array
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

from coca_mindspeed.data.records import Record, record_to_json


def record_line(record: Record) -> bytes:
    """A record as one line of JSON, as :func:`coca_mindspeed.data.records.read_records` reads it.

    Raises:
        TypeError: it holds a value that JSON has no form for.
        ValueError: it holds NaN, infinity or half of a surrogate pair.
    """
    # Not as an escape, which readers of records refuse.
    return (json.dumps(record_to_json(record), ensure_ascii=False, allow_nan=False) + "\n").encode("utf-8")


class RecordSpool:
    """Appended records, each with the place it came from; 24 bytes of memory a record.

    Args:
        path: a file to be made; it is removed at the end.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("w+b")
        self._offsets = array("Q")
        self._files = array("L")
        self._rows = array("Q")
        self._end = 0

    def __enter__(self) -> "RecordSpool":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        self._path.unlink(missing_ok=True)

    def __len__(self) -> int:
        return len(self._offsets)

    def append(self, line: bytes, file: int, row: int) -> None:
        """Add a record's :func:`record_line`, which came from row ``row`` of the file with this index."""
        self._file.seek(self._end)
        self._file.write(line)
        self._offsets.append(self._end)
        self._files.append(file)
        self._rows.append(row)
        self._end += len(line)

    def place(self, index: int) -> tuple[int, int]:
        """``(index of the file, row)`` that the record came from."""
        return self._files[index], self._rows[index]

    def line(self, index: int) -> bytes:
        """The record's line."""
        self._file.seek(self._offsets[index])
        return self._file.readline()

    def values(self, index: int) -> dict[str, Any]:
        """The record's fields."""
        values: dict[str, Any] = json.loads(self.line(index))
        return values

    def copy(self, indices: Iterable[int], target: Path) -> None:
        """Write the records with these indices, in this order, as JSON Lines."""
        with target.open("wb") as out:
            out.writelines(map(self.line, indices))
