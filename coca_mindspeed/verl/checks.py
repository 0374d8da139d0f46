"""Checks of a run on verl: its requirements, its files, and the rows and prompts that verl has read."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from coca_mindspeed.config.checks import same_file
from coca_mindspeed.config.requirements import required
from coca_mindspeed.data.export import record_of
from coca_mindspeed.data.prompts import TemplateKeys, bounded_prompt_tokens, check_template, prompt_messages
from coca_mindspeed.data.records import Record
from coca_mindspeed.errors import DataError, Problem, find_problems
from coca_mindspeed.verl.requirements import (
    BATCHES,
    COUNTS,
    ENGINE,
    REQUIREMENTS,
    SCHEDULE,
    TRAIN_FILES,
    VAL_FILES,
    VerlRun,
)
from coca_mindspeed.verl.settings import VerlSettings


def verl_problems(config: Mapping[str, Any], settings: VerlSettings) -> list[Problem]:
    """All problems of a resolved verl configuration in plain containers, whose section ``coca`` is ``settings``."""
    run = VerlRun(config, settings)
    last = (required(BATCHES), required(SCHEDULE), _same_files)
    return [*required(REQUIREMENTS)(run), *find_problems(run, [required(ENGINE)], [required(COUNTS)], last)]


def _same_files(run: VerlRun) -> Iterator[Problem]:
    without = "set trainer.test_freq=-1 and trainer.val_before_train=false"
    for train in run.files(TRAIN_FILES) if run.evaluates else ():
        for evaluate in run.files(VAL_FILES):
            yield from same_file(TRAIN_FILES, train, VAL_FILES, evaluate, without)


def check_rows(
    rows: Sequence[Mapping[str, Any]], what: str, system_prompt: str | None, tokenizer: Any, max_tokens: int
) -> list[Record]:
    """Return the records of all rows of a data set that verl has read.

    ``what`` is ``data.train_files`` or ``data.val_files``; a file made for another ``system_prompt`` is refused.
    ``max_tokens`` is ``data.max_prompt_length``; verl silently cuts a longer prompt.
    """
    records = [checked_record(row, f"{what}: row {number}", system_prompt) for number, row in enumerate(rows, start=1)]
    for _ in bounded_prompt_tokens(tokenizer, records, system_prompt, max_tokens, "data.max_prompt_length"):
        pass
    return records


def checked_record(row: Mapping[str, Any], where: str, system_prompt: str | None) -> Record:
    """The record of a row; raises DataError if the row was made for another ``system_prompt``, or is none of ours."""
    record = record_of(row.get("extra_info"), where)
    wanted, messages = prompt_messages(record, system_prompt), row.get("prompt")
    if (written := [dict(message) for message in messages or ()]) != wanted:
        raise DataError(
            f"{record.name} has another prompt than the method's: expected {_shown(wanted)}, found {_shown(written)}; "
            "export the file for this method (coca-mindspeed data export verl, --prompt and --thinking)"
        )
    return record


def check_prompts(
    records: Sequence[Record], system_prompt: str | None, tokenizer: Any, path: str, settings: VerlSettings
) -> None:
    """Check the prompts that the chat template renders; see ``check_template``.

    ``data.apply_chat_template_kwargs`` is written into the template of ``tokenizer``; ``path`` is the model's.
    """
    keys = TemplateKeys(
        variables="data.apply_chat_template_kwargs",
        thinking="coca.method.thinking",
        day="give the template's own variable a date by data.apply_chat_template_kwargs (Llama 3.1: date_string), or "
        "write the date into the template",
    )
    model = f"actor_rollout_ref.model.path={path}"
    check_template(tokenizer, records, system_prompt, model, keys, thinking=settings.method.thinking)


def _shown(messages: Sequence[Mapping[str, str]]) -> str:
    return " | ".join(f"{message.get('role')}: {message.get('content', '')!r:.60}" for message in messages)
