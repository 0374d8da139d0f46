"""From a record to chat messages: the method's system prompt, the question, and its instruction."""

from coca_mindspeed.algorithm.response import MATH_INSTRUCTION
from coca_mindspeed.data.records import Record

# Code and factual questions keep their benchmark's own instruction, which their records carry in metadata.
_INSTRUCTIONS = {"math": MATH_INSTRUCTION}


def prompt_messages(record: Record, system_prompt: str | None) -> list[dict[str, str]]:
    """Chat messages for one record.

    Args:
        record: its ``system``, if set, wins over ``system_prompt``; its ``metadata["instruction"]``, if set (it may
            be empty), wins over the category's default.
        system_prompt: the method's, or None for no system message.
    """
    instruction = record.metadata.get("instruction", _INSTRUCTIONS.get(record.category, ""))
    user = f"{record.question} {instruction}" if instruction else record.question
    system = record.system if record.system is not None else system_prompt
    messages = [] if system is None else [{"role": "system", "content": system}]
    return [*messages, {"role": "user", "content": user}]
