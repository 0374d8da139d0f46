"""How a tiny model learns to think before it answers."""

from dataclasses import replace

from coca_mindspeed.algorithm.parsing import END_THINK_TAG

CHARACTERS = "".join(sorted(set(END_THINK_TAG)))  # for the symbols of a tiny tokenizer


def behind_thoughts(records):
    """Records whose answers stand behind a thought that repeats the question.

    A warm-up without ``method.thinking`` teaches whole responses of this form; with it, it teaches confidences alone.
    """
    return [replace(record, answer=f"{record.question}{END_THINK_TAG}{record.answer}") for record in records]
