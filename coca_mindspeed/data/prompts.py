"""From a record to chat messages: the method's system prompt, the question, and its instruction."""

from collections.abc import Iterator, Sequence
from typing import Any

from coca_mindspeed.algorithm.response import MATH_INSTRUCTION
from coca_mindspeed.data.records import Record
from coca_mindspeed.errors import DataError

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


def many_prompt_tokens(tokenizer: Any, conversations: Sequence[Sequence[dict[str, str]]]) -> list[list[int]]:
    """As :func:`prompt_tokens`, of many chats at once, which a fast tokenizer spreads over the CPUs."""
    rendered = [
        tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False)
        for messages in conversations
    ]
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
    rendered = tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False)
    # The template writes the special tokens itself.
    ids: list[int] = tokenizer.encode(rendered, add_special_tokens=False)
    return ids
