"""Collect responses to questions into a file; each is appended at once, so that a stopped collection is resumed."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from coca_mindspeed.data.records import Record
from coca_mindspeed.errors import DataError
from coca_mindspeed.utils.files import naming
from coca_mindspeed.utils.json_files import drop_torn_line, read_json_lines, to_json_line, write_json_lines

Key = tuple[str, int]  # id of a question, and number of the sample
#: Takes the response to a question: ``response``, ``tokens``, ``finish_reason`` and the digest of its ``form``.
Add = Callable[[Key, Mapping[str, Any]], None]
#: Answers questions, and adds each response when it is there.
Answerer = Callable[[Mapping[Key, Record], Add], None]


def collect_responses(
    answer: Answerer, questions: Mapping[Key, Record], path: Path, progress: Callable[[int], None]
) -> None:
    """Answer the questions to which ``path`` has no response yet, and put its rows in order.

    A row has ``id``, ``sample`` and the fields of :data:`Add`.  ``progress`` is called with the number of answered
    questions.

    Raises DataError if ``path`` holds other rows, and what ``answer`` raises.
    """
    rows = _answered(path, questions)
    if missing := {key: record for key, record in questions.items() if key not in rows}:
        with path.open("ab") as file:

            def add(key: Key, reply: Mapping[str, Any]) -> None:
                rows[key] = {"id": key[0], "sample": key[1], **reply}
                with naming(path):
                    file.write(to_json_line(rows[key]).encode("utf-8"))
                    file.flush()
                    os.fsync(file.fileno())
                progress(len(rows))

            answer(missing, add)
        write_json_lines(path, [rows[key] for key in questions])  # they arrived in any order


def _answered(path: Path, wanted: Mapping[Key, Record]) -> dict[Key, dict[str, Any]]:
    if not path.exists():
        return {}
    drop_torn_line(path)
    rows: dict[Key, dict[str, Any]] = {}
    for number, row in read_json_lines(path):
        sample = row.get("sample")
        key = (str(row.get("id")), sample if isinstance(sample, int) else -1)
        if key not in wanted or not isinstance(row.get("response"), str):
            raise DataError(
                f"{path}:{number}: expected 'id' and 'sample' of a question, and 'response', found {row!r:.80}"
            )
        rows[key] = row
    return rows
