"""Filters by difficulty, source and prompt length, and the label check of preparation."""

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from coca_mindspeed.data.prompts import prompt_messages, prompt_tokens, write_into_template
from coca_mindspeed.data.records import Record
from coca_mindspeed.errors import DataError, GradingError
from coca_mindspeed.grading.registry import grader_class, grader_name
from coca_mindspeed.utils.tokenization import load_tokenizer

#: Returns why a record is dropped, or None to keep it.  Reasons are counted, so they name no single record.
Filter = Callable[[Record], str | None]


def by_difficulty(low: float, high: float, *, keep_unknown: bool = False) -> Filter:
    """Keep records whose ``metadata["difficulty"]`` is in ``[low, high]``; 0 is easiest."""

    def keep(record: Record) -> str | None:
        difficulty = record.metadata.get("difficulty")
        if difficulty is None:
            return None if keep_unknown else "unknown"
        return f"below {low:g}" if difficulty < low else f"above {high:g}" if difficulty > high else None

    return keep


def by_source(include: Collection[str], exclude: Collection[str]) -> Filter:
    """Keep records whose ``metadata["source"]`` is in ``include`` (empty: any) and not in ``exclude``."""

    def keep(record: Record) -> str | None:
        source = str(record.metadata.get("source", "unknown"))
        return source if source in exclude or (include and source not in include) else None

    return keep


def by_length(count: Callable[[Record], int], shortest: int, longest: int | None) -> Filter:
    """Keep records whose whole prompt has between ``shortest`` and ``longest`` tokens, as ``count`` counts them."""

    def keep(record: Record) -> str | None:
        length = count(record)
        if length < shortest:
            return f"prompt shorter than {shortest} tokens"
        return f"prompt longer than {longest} tokens" if longest is not None and length > longest else None

    return keep


class PromptCounter:
    """Counts the tokens of a record's prompt; without a chat template, of the messages' texts."""

    def __init__(self, tokenizer: Path, system_prompt: str | None, variables: Mapping[str, Any] | None = None) -> None:
        self._tokenizer = load_tokenizer(tokenizer)
        self._system_prompt = system_prompt
        if variables:
            write_into_template(self._tokenizer, variables)

    def __call__(self, record: Record) -> int:
        messages = prompt_messages(record, self._system_prompt)
        if self._tokenizer.chat_template is None:
            return sum(len(self._tokenizer.encode(m["content"], add_special_tokens=False)) for m in messages)
        return len(prompt_tokens(self._tokenizer, messages))


#: For each record, why its gold answer cannot be graded, or an empty string.
LabelChecker = Callable[[Sequence[Record]], Sequence[str]]
#: For each gold answer of mathematics, why it cannot be parsed, or an empty string.
MathProblems = Callable[[Sequence[str]], Sequence[str]]


def label_checker(math: MathProblems) -> LabelChecker:
    """Return the label check of all records: the grader's requirements, and that mathematics parses.

    ``math`` is called once for all math records of a batch, because it parses in processes of its own.
    """

    def check(records: Sequence[Record]) -> list[str]:
        problems = [_problem(record) for record in records]
        places = [index for index, problem in enumerate(problems) if problem is None]
        parsed = dict(zip(places, math([records[index].answer for index in places]), strict=True))
        return [parsed[index] if problem is None else problem for index, problem in enumerate(problems)]

    return check


def _problem(record: Record) -> str | None:
    """Why the record's grader would refuse it, or an empty string; None if its answer has yet to be parsed."""
    try:
        name = grader_name(record)
        if name == "math":
            return None
        grader_class(name).check([record])
    except (DataError, GradingError) as error:
        # Without the record's name: reasons are counted.
        return str(error).removeprefix(f"record {record.id!r} of {record.dataset!r}: ")
    return "" if name == "code" or record.answer.strip() else "empty gold answer"  # programs have tests instead
