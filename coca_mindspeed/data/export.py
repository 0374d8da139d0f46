"""Records as verl's JSON Lines and back: a row carries its whole record as JSON text, which no reader reinterprets."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from coca_mindspeed.data.prompts import prompt_messages
from coca_mindspeed.data.records import Record, read_records, record_from_json, record_to_json
from coca_mindspeed.errors import ConfigError, DataError
from coca_mindspeed.utils.files import to_json_line, write_json_lines


def verl_row(record: Record, system_prompt: str | None, index: int) -> dict[str, Any]:
    """One line of verl's data, with the names that its data loader, reward manager and dumps read."""
    return {
        "prompt": prompt_messages(record, system_prompt),
        "data_source": record.dataset,
        "ability": record.category,
        "reward_model": {"style": "rule", "ground_truth": record.answer},
        "extra_info": {"index": index, "record": to_json_line(record_to_json(record)).rstrip("\n")},
    }


def record_of(extra_info: Any, where: str) -> Record:
    """The record in ``extra_info``; raises ``DataError`` if there is none."""
    text = extra_info.get("record") if isinstance(extra_info, Mapping) else None
    try:
        row = json.loads(text) if isinstance(text, str) else None
    except ValueError as error:
        raise DataError(f"{where}: extra_info.record is no JSON: {error}") from error
    if not isinstance(row, dict):
        raise DataError(
            f"{where}: extra_info.record should be a record as JSON object, found {text!r:.80}; make the file with "
            "coca-mindspeed data export verl"
        )
    return record_from_json(row, where, dataset=str(row.get("dataset", "")), number=0)


def export_for_verl(records: Path, output: Path, system_prompt: str | None, overwrite: bool = False) -> int:
    """Write a file of prepared records for verl, completely or not at all; return its number of rows.

    The name of ``output`` ends in .jsonl, by which verl recognises the format.
    """
    if output.suffix != ".jsonl":
        raise ConfigError(f"{output}: expected a file whose name ends in .jsonl; verl reads others as other formats")
    if output.is_dir() or (output.exists() and not overwrite):
        raise DataError(f"{output}: already exists; choose another output, or replace a file with --overwrite")
    if not output.absolute().parent.is_dir():
        raise DataError(f"{output}: cannot be made: {output.absolute().parent} is no directory")
    rows = [verl_row(record, system_prompt, index) for index, record in enumerate(read_records(records))]
    if not rows:
        raise DataError(f"{records}: no record found")
    write_json_lines(output, rows)
    return len(rows)
