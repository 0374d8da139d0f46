"""The request log: an SQLite file with a row for each request and its label, and its export as JSON Lines.

A row is written before the end of its answer is sent, and a label before it is acknowledged; both survive kill -9.
While the file cannot be written, rows wait in memory and labels are refused. Several proxies may share one file.
"""

import json
import sqlite3
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from coca_mindspeed.errors import ConfigError, DataError
from coca_mindspeed.evaluation.predictions import Prediction, prediction_to_json
from coca_mindspeed.utils.json_files import to_json_line
from coca_router.trace import Trace

_SCHEMA = """
CREATE TABLE IF NOT EXISTS requests (
    request_id TEXT PRIMARY KEY, time REAL NOT NULL, answered INTEGER NOT NULL, row TEXT NOT NULL,
    correct INTEGER, labelled REAL
);
CREATE INDEX IF NOT EXISTS by_time ON requests (time);
"""
_INSERT = "INSERT OR IGNORE INTO requests (request_id, time, answered, row) VALUES (?, ?, ?, ?)"
_LABEL = "UPDATE requests SET correct = ?, labelled = ? WHERE request_id = ? AND answered AND correct IS NULL"
_DELETE_OLD = """
DELETE FROM requests WHERE request_id IN (SELECT request_id FROM requests WHERE time < ? ORDER BY time LIMIT ?)
"""
_MOST_DELETED = 1000  # rows at once
_MOST_WAITING = 10_000
_CLEAN_EVERY_S = 60.0
_BUSY_S = 2.0  # longest wait for another process that writes


class LogError(Exception):
    """The log cannot be written; the message says why."""


class RequestLog:
    """The log of one proxy.

    ``problem`` is the reason of the last write if it failed, else None; ``waiting`` are rows that are not written yet.
    """

    def __init__(self, directory: Path, model: str, *, texts: bool = False, max_days: float = 90.0) -> None:
        """Open ``requests.sqlite``; ConfigError if that fails. ``texts`` stores questions and answers."""
        self._model, self._texts, self._max_age_s = model, texts, max_days * 86_400
        self.waiting: deque[tuple[Any, ...]] = deque(maxlen=_MOST_WAITING)
        self._clean_at, self._prepared = 0.0, False
        self.problem: str | None = None
        try:
            directory.mkdir(parents=True, exist_ok=True)
            path = directory / "requests.sqlite"
            path.touch(mode=0o640)
            self._database = sqlite3.connect(path, isolation_level=None, timeout=_BUSY_S, check_same_thread=False)
            self._prepare()
        except sqlite3.OperationalError as error:  # a full disk, or another process that writes: tried again later
            self.problem = str(error)
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(f"log.directory {directory}: the request log cannot be opened: {error}") from error

    def write(self, trace: Trace, outcome: str, ended: float, question: str, answer: str) -> None:
        """Log a request; if that fails, the row waits for the next write."""
        row = {"time": time.time(), "model": self._model, **trace.record(outcome, ended)}
        if self._texts:
            row |= {"question": question, "response": answer}
        answered = outcome == "ok" and trace.action == "answer"
        self.waiting.append((trace.id, row["time"], answered, to_json_line(row)))
        with suppress(LogError):
            self._flush()

    def label(self, request_id: str, correct: bool) -> bool:
        """Store a label; return False if no answer of this id lacks one. Raises LogError."""
        self._flush()
        with self._writing():
            return bool(self._database.execute(_LABEL, (correct, time.time(), request_id)).rowcount)

    def close(self) -> None:
        with suppress(LogError):
            self._flush()
        self._database.close()

    def _flush(self) -> None:
        if not self.waiting:
            return
        with self._writing():
            self._database.executemany(_INSERT, self.waiting)
            if time.monotonic() > self._clean_at:
                deleted = self._database.execute(_DELETE_OLD, (time.time() - self._max_age_s, _MOST_DELETED)).rowcount
                self._clean_at = time.monotonic() + (_CLEAN_EVERY_S if deleted < _MOST_DELETED else 0)
        self.waiting.clear()

    def _prepare(self) -> None:
        if not self._prepared:
            self._database.execute("PRAGMA journal_mode=WAL")
            # kill -9 loses nothing; a power failure may lose the last rows.
            self._database.execute("PRAGMA synchronous=NORMAL")
            self._database.executescript(_SCHEMA)
            self._prepared = True

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """A transaction; LogError if it failed and was rolled back."""
        try:
            self._prepare()
            self._database.execute("BEGIN IMMEDIATE")
            yield
            self._database.execute("COMMIT")
        except sqlite3.Error as error:
            self.problem = str(error)
            with suppress(sqlite3.Error):
                self._database.rollback()
            raise LogError(str(error)) from error
        self.problem = None


def labelled_prediction(row: Mapping[str, Any], correct: bool) -> Prediction:
    """A labelled row as a prediction; without a ``basis`` the label says nothing about the confidence."""
    stated = row["basis"] is not None
    return Prediction(
        id=row["id"],
        dataset=row["domain"] or "served",
        question=row.get("question", ""),
        response=row.get("response", ""),
        confidence=row["stated_confidence"] if stated else None,
        correct=correct,
        tokens_to_confidence=row["tokens_to_confidence"] if stated else None,
        method=row["action"],
        model=row["tier"],
        tokens=row["tokens"].get(row["tier"]),  # with those of its confidences
        answer_probability=row.get("answer_probability") if stated else None,  # rows of older releases lack it
        form=row.get("form"),
    )


def export_log(directory: Path, output: Path) -> tuple[int, int]:
    """Write ``requests.jsonl`` and ``labelled.jsonl`` (predictions); return their numbers of rows."""
    path = directory / "requests.sqlite"
    if not path.exists():
        raise DataError(f"{path}: no request log; expected the directory of log.directory")
    output.mkdir(parents=True, exist_ok=True)
    rows = labels = 0
    with (
        closing(sqlite3.connect(path, timeout=_BUSY_S)) as database,
        (output / "requests.jsonl").open("w", encoding="utf-8") as requests,
        (output / "labelled.jsonl").open("w", encoding="utf-8") as labelled,
    ):
        for text, label in database.execute("SELECT row, correct FROM requests ORDER BY time"):
            row, correct = json.loads(text), None if label is None else bool(label)
            requests.write(to_json_line(row | {"correct": correct}))
            rows += 1
            if correct is not None:
                labelled.write(to_json_line(prediction_to_json(labelled_prediction(row, correct))))
                labels += 1
    return rows, labels
