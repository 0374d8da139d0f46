"""How long a cell was worked on, by all processes that did, and where and from which source; a kill loses seconds."""

import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from coca_mindspeed.files import read_json_lines, write_json_lines
from coca_mindspeed.reproduce.provenance import source

_EVERY = 10.0  # seconds


class Timesheet:
    """A context in which time is counted, into a row of its file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._before: list[dict[str, Any]] = [row for _, row in read_json_lines(path)] if path.exists() else []
        self._source = source()
        self._started = time.perf_counter()
        self._ended = threading.Event()
        self._writer = threading.Thread(target=self._write_on, daemon=True)

    def __enter__(self) -> "Timesheet":
        self._write()
        self._writer.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._writer.join()
        self._write()

    @property
    def seconds(self) -> float:
        """Of wall time, of this process and those before it."""
        return sum(float(row["seconds"]) for row in self._rows())

    @property
    def sources(self) -> list[str]:
        """The commits that worked on it, each once, in order."""
        return list(dict.fromkeys(row["commit"] for row in self._rows()))

    @property
    def machines(self) -> list[str]:
        """Those that it was worked on, as far as that was written down, each once, in order."""
        return list(dict.fromkeys(row["machine"] for row in self._rows() if "machine" in row))

    def _rows(self) -> list[dict[str, Any]]:
        return [*self._before, {**self._source, "seconds": time.perf_counter() - self._started}]

    def _write(self) -> None:
        write_json_lines(self._path, self._rows())

    def _write_on(self) -> None:
        while not self._ended.wait(_EVERY):
            self._write()
