"""From a record to chat messages: the method's system prompt, the question, and its instruction."""

from coca_mindspeed.algorithm.response import MATH_INSTRUCTION
from coca_mindspeed.data.records import Record

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
