"""From records to token ids by a tokenizer's chat template; needs the tokenizer alone, not the model."""

from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from coca_mindspeed.config.schema import ModelConfig
from coca_mindspeed.data.chat_template import reads_clock, write_into_template
from coca_mindspeed.data.prompts import prompt_messages, render_chat
from coca_mindspeed.data.records import Record
from coca_mindspeed.errors import ConfigError, DataError
from coca_mindspeed.utils.files import LONE_SURROGATE


def load_tokenizer(path: Path, config: ModelConfig, *, where: str = "model.path") -> Any:
    """The fast tokenizer of a local Hugging Face directory, with a chat template; nothing is downloaded.

    The variables and the date of ``config`` are written into the template.

    Raises:
        ConfigError: the directory is not there, its tokenizer does not load, it lacks a chat template, or the template
            does not use a variable.
    """
    if not (path / "config.json").is_file():
        raise ConfigError(f"{where}={path}: not a Hugging Face model directory (it has no config.json)")
    try:
        source = {"trust_remote_code": config.trust_remote_code, "local_files_only": True}
        tokenizer = AutoTokenizer.from_pretrained(path, **source)
    # A damaged tokenizer.json raises a bare Exception in the tokenizers library.
    except Exception as error:
        raise ConfigError(f"{where}={path}: its tokenizer cannot be loaded: {error}") from error
    if tokenizer.chat_template is None:
        raise ConfigError(f"{where}={path}: its tokenizer has no chat template, so prompts cannot be laid out")
    day = None if config.prompt_date is None else date.fromisoformat(config.prompt_date)
    write_into_template(tokenizer, config.chat_template_kwargs, day)
    return tokenizer


def reads_date(config: ModelConfig, record: Record, system_prompt: str | None) -> bool:
    """Whether the chat template of ``config.path`` puts today's date into the prompt of ``record``.

    Raises:
        ConfigError: the tokenizer does not load, or its template cannot render the prompt.
    """
    tokenizer = load_tokenizer(Path(str(config.path)), config)
    return reads_clock(tokenizer, prompt_messages(record, system_prompt))


def render_prompts(tokenizer: Any, records: Sequence[Record], system_prompt: str | None) -> list[str]:
    """Each record's prompt as text, special tokens included, up to where the response begins.

    Raises:
        ConfigError: the chat template cannot lay out a record, a system message above all.
        DataError: a prompt holds half a UTF-16 pair, which no tokenizer can read.
    """
    rendered = [render_chat(tokenizer, prompt_messages(record, system_prompt)) for record in records]
    for record, text in zip(records, rendered, strict=True):
        if found := LONE_SURROGATE.search(text):
            raise DataError(
                f"record {record.id!r} of {record.dataset}: its prompt holds {found[0]!a}, half of a UTF-16 pair, "
                "which no tokenizer can read; mend the text"
            )
    return rendered


def encode_prompts(
    tokenizer: Any, records: Sequence[Record], system_prompt: str | None, max_tokens: int
) -> list[list[int]]:
    """Token ids of each record's prompt.

    Raises:
        ConfigError: the chat template cannot lay out a record.
        DataError: a prompt is longer than ``max_tokens``; it names the record.
    """
    rendered = render_prompts(tokenizer, records, system_prompt)
    # The template writes the special tokens itself.
    prompts: list[list[int]] = tokenizer(rendered, add_special_tokens=False)["input_ids"]
    for record, prompt in zip(records, prompts, strict=True):
        check_prompt_length(record, len(prompt), max_tokens)
    return prompts


def check_prompt_length(
    record: Record, length: int, max_tokens: int, *, key: str = "rollout.max_prompt_tokens"
) -> None:
    """Raise ``DataError`` for a prompt that is empty or longer than ``max_tokens``, which ``key`` sets."""
    if not 0 < length <= max_tokens:
        raise DataError(
            f"record {record.id!r} of {record.dataset}: its prompt has {length} tokens, expected "
            f"1 to {max_tokens} ({key})"
        )
