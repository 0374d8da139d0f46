"""Which prompts of a file are too long for a run, without tokenizing those that cannot be."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coca_mindspeed.data.preparing.filters import PromptCounter
from coca_mindspeed.data.prompts import prompt_messages
from coca_mindspeed.data.records import read_records

# A token stands for a byte at least, so a prompt has at most as many tokens as bytes.  Chat templates add a few dozen
# bytes around each message, and some a date or a default system prompt.
_TEMPLATE_BYTES = 512


@dataclass(frozen=True, slots=True)
class LongPrompt:
    """A record whose prompt is too long."""

    record: str
    tokens: int


def too_long(
    path: Path, model: Path, system_prompt: str | None, limit: int, variables: Mapping[str, Any] | None = None
) -> list[LongPrompt]:
    """Prompts of more than ``limit`` tokens, chat template included, in the order of the file.

    Args:
        path: records, JSON Lines.
        model: Hugging Face directory with the tokenizer; only loaded if a prompt has enough bytes to be too long.
        system_prompt: the method's.
        limit: in tokens.
        variables: of the chat template.

    Raises:
        DataError: the file holds something else than records, or the directory no tokenizer.
    """
    counter: PromptCounter | None = None
    found = []
    for record in read_records(path):
        messages = prompt_messages(record, system_prompt)
        if sum(len(message["content"].encode("utf-8")) for message in messages) + _TEMPLATE_BYTES <= limit:
            continue
        counter = counter or PromptCounter(model, system_prompt, variables)
        if (tokens := counter(record)) > limit:
            found.append(LongPrompt(record.id, tokens))
    return found
