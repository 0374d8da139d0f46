"""From records to chat messages and token ids: system prompt, question, instruction."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jinja2

from coca_mindspeed.algorithm.parsing import MATH_INSTRUCTION
from coca_mindspeed.data.records import Record
from coca_mindspeed.errors import ConfigError, DataError

_BATCH = 1024  # prompts per call of a fast tokenizer, which distributes them over the CPUs
SHORT_ANSWER = "Answer as briefly as possible: the answer itself, without explanation."
# Code has its benchmark's instruction in its metadata.
_INSTRUCTIONS = {"math": MATH_INSTRUCTION, "factual": SHORT_ANSWER}


def instruction_suffix(record: Record) -> str:
    """Return the text after the question: ``metadata["instruction"]`` if set, else the category's default.

    An instruction that does not begin with white space follows the question after one space, as in the paper.
    """
    instruction = str(record.metadata.get("instruction", _INSTRUCTIONS.get(record.category, "")))
    return f" {instruction}" if instruction and not instruction[0].isspace() else instruction


def prompt_messages(record: Record, system_prompt: str | None) -> list[dict[str, str]]:
    """Return the chat messages of a record.

    The record's ``system`` takes precedence over ``system_prompt``, which may be None for no system message.
    """
    system = record.system if record.system is not None else system_prompt
    messages = [] if system is None else [{"role": "system", "content": system}]
    return [*messages, {"role": "user", "content": record.question + instruction_suffix(record)}]


def render_chat(tokenizer: Any, messages: Sequence[Mapping[str, str]], **variables: Any) -> str:
    """Render a chat to text, special tokens included, up to the beginning of the response.

    Raises ConfigError if the template cannot render it, or refuses a system message.
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
        return f"{where} cannot render a prompt: {error}"
    return (
        f"{where} refuses the method's system message ({error}); put its text before the first user message in the "
        "template (see docs/training.md), so that training and serving render the same prompt"
    )


def bounded_prompt_tokens(
    tokenizer: Any, records: Sequence[Record], system_prompt: str | None, max_tokens: int, key: str, where: str = ""
) -> Iterator[list[int]]:
    """Yield the token ids of the records' prompts; a prompt is never truncated.

    ``key`` names the setting of ``max_tokens`` in messages, ``where`` the records' file.

    Raises:
        DataError: a prompt is longer than ``max_tokens``.
    """
    for start in range(0, len(records), _BATCH):
        batch = records[start : start + _BATCH]
        rendered = [render_chat(tokenizer, prompt_messages(record, system_prompt)) for record in batch]
        rows: list[list[int]] = tokenizer(rendered, add_special_tokens=False)["input_ids"]
        for number, (record, ids) in enumerate(zip(batch, rows, strict=True), start=start + 1):
            if len(ids) > max_tokens:
                place = f"{where} {number}: " if where else ""
                raise DataError(
                    f"{place}record {record.id!r} has a prompt of {len(ids)} tokens, {key} is {max_tokens}; raise it "
                    "or remove the record"
                )
            yield ids


def prompt_tokens(tokenizer: Any, messages: Sequence[dict[str, str]]) -> list[int]:
    """Return the token ids of chat messages, up to the beginning of the response.

    The template is rendered to text first: the result of ``apply_chat_template(tokenize=True)`` differs between
    releases of transformers.
    """
    rendered = render_chat(tokenizer, messages)
    # The template writes the special tokens itself.
    ids: list[int] = tokenizer.encode(rendered, add_special_tokens=False)
    return ids
