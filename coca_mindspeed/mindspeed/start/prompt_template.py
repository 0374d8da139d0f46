"""The chat template of a run on MindSpeed-RL: its variables written in, and its prompts checked."""

from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

from coca_mindspeed.data.chat_template import TEMPLATE_KEYS, check_template, write_into_template
from coca_mindspeed.data.records import Record, read_records
from coca_mindspeed.errors import ConfigError
from coca_mindspeed.mindspeed.start.settings import CocaSettings


def prepare_template(tokenizer: Any, records: Sequence[Record], settings: CocaSettings, path: str | Path) -> None:
    """Write the run's variables and date into a tokenizer's chat template, and check what it renders.

    Args:
        tokenizer: the model's; its template is changed.
        records: to ask.
        settings: of the run.
        path: of the tokenizer, for messages.

    Raises:
        ConfigError: the template does not use a variable, or its prompts cannot be trained on; see ``check_template``.
    """
    day = None if settings.prompt_date is None else date.fromisoformat(settings.prompt_date)
    write_into_template(tokenizer, settings.chat_template_kwargs, day)
    check_template(
        tokenizer,
        records,
        settings.method.training_method.system_prompt,
        f"model.path={path}",
        TEMPLATE_KEYS,
        allow_open_thinking=settings.allow_open_thinking,
    )


def try_template(path: Path, files: Sequence[Path], settings: CocaSettings) -> None:
    """Check the prompts of record files before any device is held; what is not on this machine is left out.

    Args:
        path: directory of the tokenizer.
        files: of records.
        settings: of the run.

    Raises:
        ConfigError: the tokenizer does not load or has no chat template, or as :func:`prepare_template`.
        DataError: a file holds something else than records.
    """
    records = [record for file in files if file.is_file() for record in read_records(file)]
    if not records or not (path / "tokenizer.json").is_file():
        return
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(path), local_files_only=True)
    except Exception as error:  # the tokenizers library raises bare ones
        raise ConfigError(f"model.path={path}: its tokenizer cannot be loaded: {error}") from error
    if tokenizer.chat_template is None:
        raise ConfigError(f"model.path={path}: its tokenizer has no chat template, so prompts cannot be laid out")
    prepare_template(tokenizer, records, settings, path)
