"""Records as JSON Lines of other frameworks and back.

A row carries its whole record as JSON text, which no reader of a framework reinterprets.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from coca_mindspeed.data.prompts import prompt_messages
from coca_mindspeed.data.records import Record, record_from_json, record_to_json
from coca_mindspeed.data.registry import read_records_of
from coca_mindspeed.errors import ConfigError, DataError
from coca_mindspeed.utils.json_files import to_json_line, write_json_lines

Row = dict[str, Any]


def slime_row(record: Record, system_prompt: str | None, index: int) -> Row:
    """Return a row for slime and vime; their own reward functions read ``label``."""
    row = {"prompt": prompt_messages(record, system_prompt), "label": record.answer}
    return {**row, "metadata": {"record": _text(record)}}


def swift_row(record: Record, system_prompt: str | None, index: int) -> Row:
    """Return a row for ms-swift; its own reward functions read ``solution``."""
    return {"messages": prompt_messages(record, system_prompt), "solution": record.answer, "record": _text(record)}


def trl_row(record: Record, system_prompt: str | None, index: int) -> Row:
    """Return a row for TRL; its own reward functions read ``solution``."""
    return {"prompt": prompt_messages(record, system_prompt), "solution": record.answer, "record": _text(record)}


def verl_row(record: Record, system_prompt: str | None, index: int) -> Row:
    """Return a row for verl, with the names that its data loader, reward manager and dumps read."""
    return {
        "prompt": prompt_messages(record, system_prompt),
        "data_source": record.dataset,
        "ability": record.category,
        "reward_model": {"style": "rule", "ground_truth": record.answer},
        "extra_info": {"index": index, "record": _text(record)},
    }


#: Framework -> (row, the options that take the file).
FRAMEWORKS: dict[str, tuple[Callable[[Record, str | None, int], Row], str]] = {
    "slime": (slime_row, "--prompt-data of slime and vime, with --input-key prompt --label-key label"),
    "swift": (swift_row, "ms-swift's --dataset and --val_dataset"),
    "trl": (trl_row, 'datasets.load_dataset("json", data_files=FILE), for TRL\'s train_dataset and eval_dataset'),
    "verl": (verl_row, "verl's data.train_files and data.val_files"),
}


def _text(record: Record) -> str:
    return to_json_line(record_to_json(record)).rstrip("\n")


def record_of(row: Any, where: str) -> Record:
    """The record in ``row["record"]``; in rows of slime and verl, ``row`` is their ``metadata``, ``extra_info``.

    Raises DataError: the row is no mapping with a record.
    """
    text = row.get("record") if isinstance(row, Mapping) else None
    try:
        fields = json.loads(text) if isinstance(text, str) else None
    except ValueError as error:
        raise DataError(f"{where}: 'record' is no JSON: {error}") from error
    if not isinstance(fields, dict):
        raise DataError(
            f"{where}: 'record' should be a record as JSON object, found {text!r:.80}; make the file with "
            f"coca-mindspeed data export {'|'.join(FRAMEWORKS)}"
        )
    return record_from_json(fields, where, dataset=str(fields.get("dataset", "")), number=0)


def export_records(
    framework: str,
    records: Path,
    output: Path,
    system_prompt: str | None,
    overwrite: bool = False,
    columns: Mapping[str, str] | None = None,
) -> int:
    """Write a file of records for a framework, completely or not at all; return its number of rows.

    ``records`` is in any format that training reads, with ``columns`` by field where their names differ.

    The name of ``output`` ends in .jsonl, by which ms-swift and verl recognise the format.
    """
    row, _ = FRAMEWORKS[framework]
    if output.suffix != ".jsonl":
        raise ConfigError(f"{output}: expected a file whose name ends in .jsonl; other names are read as other formats")
    if output.is_dir() or (output.exists() and not overwrite):
        raise DataError(f"{output}: already exists; choose another output, or replace a file with --overwrite")
    if not output.absolute().parent.is_dir():
        raise DataError(f"{output}: cannot be made: {output.absolute().parent} is no directory")
    source = read_records_of("--input", records, columns)
    rows = [row(record, system_prompt, index) for index, record in enumerate(source)]
    write_json_lines(output, rows)
    return len(rows)
