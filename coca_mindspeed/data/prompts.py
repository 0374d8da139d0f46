"""From a record to chat messages: the method's system prompt, the question, and its instruction."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jinja2

from coca_mindspeed.algorithm.parsing import MATH_INSTRUCTION
from coca_mindspeed.data.records import Record
from coca_mindspeed.errors import ConfigError, DataError

_AT_ONCE = 1024  # prompts that a fast tokenizer is given together, which it spreads over the CPUs
# Code and factual questions keep their benchmark's own instruction, which their records carry in metadata.
_INSTRUCTIONS = {"math": MATH_INSTRUCTION}


def instruction_suffix(record: Record) -> str:
    """What follows the question: its ``metadata["instruction"]`` if that is set, else its category's default.

    An instruction that does not begin with white space of its own stands one space after the question, as in the
    paper; that of code begins with a blank line.
    """
    instruction = str(record.metadata.get("instruction", _INSTRUCTIONS.get(record.category, "")))
    return f" {instruction}" if instruction and not instruction[0].isspace() else instruction


def prompt_messages(record: Record, system_prompt: str | None) -> list[dict[str, str]]:
    """Chat messages for one record.

    Args:
        record: its ``system``, if set, wins over ``system_prompt``; its ``metadata["instruction"]``, if set (it may
            be empty), wins over the category's default.
        system_prompt: the method's, or None for no system message.
    """
    system = record.system if record.system is not None else system_prompt
    messages = [] if system is None else [{"role": "system", "content": system}]
    return [*messages, {"role": "user", "content": record.question + instruction_suffix(record)}]


def render_chat(tokenizer: Any, messages: Sequence[Mapping[str, str]], **variables: Any) -> str:
    """The text of a chat, special tokens included, up to where the response begins.

    Args:
        tokenizer: with a chat template.
        messages: of the chat.
        variables: of the template.

    Raises:
        ConfigError: the template cannot render it; a template that refuses a system message is named as such.
    """
    try:
        text: str = tokenizer.apply_chat_template(
            list(messages), add_generation_prompt=True, tokenize=False, **variables
        )
    except jinja2.TemplateError as error:
        raise ConfigError(_template_problem(tokenizer, messages, error)) from error
    return text


def _template_problem(tokenizer: Any, messages: Sequence[Mapping[str, str]], error: Exception) -> str:
    where = f"the chat template of {tokenizer.name_or_path or 'the tokenizer'}"
    without_system = [message for message in messages if message["role"] != "system"]
    try:
        tokenizer.apply_chat_template(without_system, add_generation_prompt=True, tokenize=False)
    except jinja2.TemplateError:
        return f"{where} cannot lay out a prompt: {error}"
    return (
        f"{where} refuses a system message ({error}), and the method's prompt is one; let the template put its text "
        "before the first user message (docs/training.md has the lines), so that whatever serves the trained "
        "model lays out the same prompt"
    )


def many_prompt_tokens(tokenizer: Any, conversations: Sequence[Sequence[dict[str, str]]]) -> list[list[int]]:
    """As :func:`prompt_tokens`, of many chats at once, which a fast tokenizer spreads over the CPUs."""
    rendered = [render_chat(tokenizer, messages) for messages in conversations]
    rows: list[list[int]] = tokenizer(rendered, add_special_tokens=False)["input_ids"]
    return rows


def bounded_prompt_tokens(
    tokenizer: Any, records: Sequence[Record], system_prompt: str | None, max_tokens: int, key: str, where: str = ""
) -> Iterator[list[int]]:
    """Token ids of the records' prompts, one after the other; a prompt is never cut.

    Args:
        tokenizer: the model's.
        records: in their order.
        system_prompt: the method's.
        max_tokens: of a prompt.
        key: that says so, for the message.
        where: of the records, for the message; the number of the record, from 1, follows it.

    Raises:
        DataError: one is longer.
    """
    for start in range(0, len(records), _AT_ONCE):
        batch = records[start : start + _AT_ONCE]
        rows = many_prompt_tokens(tokenizer, [prompt_messages(record, system_prompt) for record in batch])
        for number, (record, ids) in enumerate(zip(batch, rows, strict=True), start=start + 1):
            if len(ids) > max_tokens:
                place = f"{where} {number}: " if where else ""
                raise DataError(
                    f"{place}record {record.id!r} has a prompt of {len(ids)} tokens, {key} is {max_tokens}; raise it "
                    "or leave the record out"
                )
            yield ids


def prompt_tokens(tokenizer: Any, messages: Sequence[dict[str, str]]) -> list[int]:
    """Token ids of chat messages, up to where the response begins.

    The template is rendered to text first: what ``apply_chat_template(tokenize=True)`` returns differs between
    releases of ``transformers``, a list of ids or a mapping of several lists.
    """
    rendered = render_chat(tokenizer, messages)
    # The template writes the special tokens itself.
    ids: list[int] = tokenizer.encode(rendered, add_special_tokens=False)
    return ids
