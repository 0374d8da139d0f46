"""The log of a proxy: a line a request, and a line a label that came later, which ``evaluate`` reads."""

import json
import os
import time
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from coca_mindspeed.evaluation.predictions import Prediction, prediction_to_json
from coca_mindspeed.files import read_json_lines, to_json_line
from coca_mindspeed.serving.trace import Trace

_REMEMBERED = 200_000  # requests whose labels are still waited for


class Journal:
    """``requests.jsonl`` and ``labelled.jsonl``; texts only where they were asked for."""

    def __init__(self, directory: Path, model: str, *, texts: bool = False) -> None:
        """Open the log, and remember what earlier runs answered."""
        directory.mkdir(parents=True, exist_ok=True)
        self._requests, self._labelled = directory / "requests.jsonl", directory / "labelled.jsonl"
        self._model, self._texts = model, texts
        self._waiting: OrderedDict[str, dict[str, Any]] = OrderedDict()
        if self._requests.exists():
            _drop_torn_line(self._requests)
            for _, row in read_json_lines(self._requests):
                self._remember(row)
        if self._labelled.exists():
            _drop_torn_line(self._labelled)
            for _, row in read_json_lines(self._labelled):
                self._waiting.pop(row["id"], None)

    def write(self, trace: Trace, outcome: str, ended: float, question: str, answer: str) -> None:
        """Log a request."""
        row = {
            "id": trace.id,
            "time": time.time(),
            "model": self._model,
            "domain": trace.domain,
            "outcome": outcome,
            **trace.fields(),
            "basis": trace.basis,
            "cost": trace.cost,
            "prompt_tokens": trace.prompt_tokens,
            "answer_tokens": trace.answer_tokens,
            "finish_reason": trace.finish_reason,
            "steps": trace.steps,
            "shadow": trace.shadow,
            "seconds_to_decision": None if trace.decided is None else trace.decided - trace.started,
            "seconds": ended - trace.started,
        }
        if self._texts:
            row |= {"question": question, "response": answer}
        _append(self._requests, row)
        self._remember(row)

    def label(self, id_: str, correct: bool) -> Mapping[str, Any] | None:
        """Log a late verdict as a prediction; returns the request's row, None if no such request waits for one.

        The prediction has no confidence where none speaks of this answer alone (:func:`states_its_confidence`).
        """
        row = self._waiting.pop(id_, None)
        if row is None:
            return None
        stated = states_its_confidence(row)
        prediction = Prediction(
            id=id_,
            dataset=row["domain"] or "served",
            question=row.get("question", ""),
            response=row.get("response", ""),
            confidence=row["stated_confidence"] if stated else None,
            correct=correct,
            tokens_to_confidence=row["tokens_to_confidence"] if stated else None,
            method=row["action"],
            model=row["tier"],
            tokens=row["answer_tokens"],
        )
        _append(self._labelled, prediction_to_json(prediction))
        return row

    def _remember(self, row: dict[str, Any]) -> None:
        if row["outcome"] != "ok" or row["action"] == "refuse":
            return  # there is no answer that could be right or wrong
        self._waiting[row["id"]] = row
        while len(self._waiting) > _REMEMBERED:
            self._waiting.popitem(last=False)


def states_its_confidence(row: Mapping[str, Any]) -> bool:
    """Whether the verdict on the answer of a logged request says something about the confidence beside it.

    A vote's answer comes from other samples than the confidence, and a second gate lets through the better of the
    answers that state it; both are right more often than was stated, however well that is calibrated.  Rows of earlier
    releases do not say on what grounds they were answered.
    """
    return row.get("basis") in ("confidence", "exhausted", "shadow")


def _append(path: Path, row: Mapping[str, Any]) -> None:
    """Add one line in one write, so that lines of several processes do not mix."""
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o640)
    try:
        os.write(descriptor, to_json_line(row).encode())
    finally:
        os.close(descriptor)


def _drop_torn_line(path: Path) -> None:
    """Remove a last line that a crash left unfinished; every other line is as it was written."""
    data = path.read_bytes()
    whole = data.rfind(b"\n") + 1
    try:
        torn = whole < len(data) and not isinstance(json.loads(data[whole:]), dict)
    except ValueError:
        torn = True
    if torn:
        with path.open("r+b") as file:
            file.truncate(whole)
    elif whole < len(data):
        with path.open("ab") as file:
            file.write(b"\n")
