"""The chat template of a run: set its variables and date, and check the prompts that it renders."""

from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

from coca_mindspeed.data.chat_template import TEMPLATE_KEYS, check_template, write_into_template
from coca_mindspeed.data.records import Record, read_records
from coca_mindspeed.errors import ConfigError
from coca_mindspeed.mindspeed.start.settings import CocaSettings


def prepare_template(tokenizer: Any, records: Sequence[Record], settings: CocaSettings, path: str | Path) -> None:
    """Write the run's variables and date into the chat template of ``tokenizer``, and check the prompts of ``records``.

    Args:
        tokenizer: the model's; its template is changed.
        records: to ask.
        settings: of the run.
        path: of the tokenizer, for messages.

    Raises:
        ConfigError: the template does not use a variable, or ``check_template`` refuses a prompt.
    """
    day = None if settings.prompt_date is None else date.fromisoformat(settings.prompt_date)
    write_into_template(tokenizer, settings.chat_template_kwargs, day)
    prompt = settings.method.training_method.system_prompt
    allow = settings.allow_open_thinking
    check_template(tokenizer, records, prompt, f"model.path={path}", TEMPLATE_KEYS, allow_open_thinking=allow)


def try_template(path: Path, files: Sequence[Path], settings: CocaSettings) -> None:
    """Check the prompts of record files with the tokenizer in ``path``; files that are not on this machine are skipped.

    Raises:
        ConfigError: the tokenizer does not load or has no chat template, or as :func:`prepare_template`.
        DataError: a file does not hold records.
    """
    records = [record for file in files if file.is_file() for record in read_records(file)]
    if not records or not (path / "tokenizer.json").is_file():
        return
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(path), local_files_only=True)
    except Exception as error:  # the tokenizers library raises bare exceptions
        raise ConfigError(f"model.path={path}: its tokenizer cannot be loaded: {error}") from error
    if tokenizer.chat_template is None:
        raise ConfigError(f"model.path={path}: its tokenizer has no chat template, so prompts cannot be laid out")
    prepare_template(tokenizer, records, settings, path)
