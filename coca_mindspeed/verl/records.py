"""Records as verl's JSON Lines and back: a row carries its whole record as JSON text, which no reader reinterprets."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from coca_mindspeed.data.prompts import TemplateKeys, bounded_prompt_tokens, check_template, prompt_messages
from coca_mindspeed.data.records import Record, read_records, record_from_json, record_to_json
from coca_mindspeed.errors import ConfigError, DataError
from coca_mindspeed.utils.files import to_json_line, write_json_lines
from coca_mindspeed.verl.settings import VerlSettings


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


def check_rows(
    rows: Sequence[Mapping[str, Any]], what: str, system_prompt: str | None, tokenizer: Any, max_tokens: int
) -> list[Record]:
    """Return the records of all rows of a data set that verl has read.

    ``what`` is ``data.train_files`` or ``data.val_files``; a file made for another ``system_prompt`` is refused.
    ``max_tokens`` is ``data.max_prompt_length``; verl silently cuts a longer prompt.
    """
    records = []
    for number, row in enumerate(rows, start=1):
        record = record_of(row.get("extra_info"), f"{what}: row {number}")
        wanted = prompt_messages(record, system_prompt)
        if (found := [dict(message) for message in row["prompt"]]) != wanted:
            raise DataError(
                f"{what}: row {number}: record {record.id!r} has another prompt than the method's: expected "
                f"{_shown(wanted)}, found {_shown(found)}; export the file for this method "
                "(coca-mindspeed data export verl --prompt)"
            )
        records.append(record)
    where = f"{what}: row"
    for _ in bounded_prompt_tokens(tokenizer, records, system_prompt, max_tokens, "data.max_prompt_length", where):
        pass
    return records


def check_prompts(
    records: Sequence[Record], system_prompt: str | None, tokenizer: Any, path: str, settings: VerlSettings
) -> None:
    """Check the prompts that the chat template renders; see ``check_template``.

    ``data.apply_chat_template_kwargs`` is written into the template of ``tokenizer``; ``path`` is the model's.
    """
    keys = TemplateKeys(
        variables="data.apply_chat_template_kwargs",
        allow_open_thinking="coca.allow_open_thinking",
        day="give the template's own variable a date by data.apply_chat_template_kwargs (Llama 3.1: date_string), or "
        "write the date into the template",
    )
    model = f"actor_rollout_ref.model.path={path}"
    check_template(tokenizer, records, system_prompt, model, keys, allow_open_thinking=settings.allow_open_thinking)


def _shown(messages: Sequence[Mapping[str, str]]) -> str:
    return " | ".join(f"{message.get('role')}: {message.get('content', '')!r:.60}" for message in messages)
