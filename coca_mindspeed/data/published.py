"""Rows of published data sets as records: two training sets and nine evaluation sets, in all published forms.

A converter takes a row and its number from 0 over all files, and returns the record.  It raises :class:`RowError` for a
row that is not in the published form, and :class:`Ungradable`.
"""

import math
import re
from collections.abc import Mapping
from typing import Any

from coca_mindspeed.algorithm.parsing import SHORT_ANSWER
from coca_mindspeed.data.facts import normalise_fact
from coca_mindspeed.data.records import Record, describe, scalar_text
from coca_mindspeed.utils.text_formats import JsonError, JsonLimitError, parse_json, value_of


class RowError(ValueError):
    """The row is not in the source's form."""


_ABSENT = object()


class MissingColumnError(RowError):
    """The row has no such column; :meth:`~coca_mindspeed.data.registry.DataSource.record` adds those that it has."""


class Ungradable(ValueError):  # noqa: N818 - a fact about a well-formed row, not an error of the file
    """The row is well-formed, but there is nothing to grade an answer by."""


def _column(row: Mapping[str, Any], *names: str) -> Any:
    """Return the value of the first of ``names`` that the row has; raises MissingColumnError if it has none.

    ``outer.inner`` is a key of a mapping in a column.
    """
    for name in names:
        if name in row:
            return row[name]
        if (value := value_of(row, name, _ABSENT)) is not _ABSENT:
            return value
    raise MissingColumnError(f"column {' or '.join(map(repr, names))} is missing")


def _text(row: Mapping[str, Any], *names: str) -> str:
    """Return a non-blank string; raises RowError if it is missing, blank or not a string."""
    value = _column(row, *names)
    if not isinstance(value, str):
        raise RowError(f"column {names[0]!r} should be a string, found {describe(value)}")
    if not value.strip():
        raise RowError(f"column {names[0]!r} is empty")
    return value


def _scalar_text(row: Mapping[str, Any], *names: str) -> str:
    """Return a string or number as stripped text; raises RowError if it is missing, blank or neither."""
    value = _column(row, *names)
    try:
        stripped = scalar_text(value).strip()
    except ValueError as error:
        raise RowError(f"column {names[0]!r} should be {error}") from error
    if not stripped:
        raise RowError(f"column {names[0]!r} is empty")
    return stripped


def _text_list(row: Mapping[str, Any], name: str) -> list[str]:
    """Return a list of strings, empty for null; raises RowError for anything else."""
    value = _column(row, name)
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise RowError(f"column {name!r} should be a list of strings, found {describe(value)}")
    return value


def _optional(row: Mapping[str, Any], **columns: str) -> dict[str, Any]:
    """Return metadata ``{key: value}`` of the columns that exist and hold a JSON value."""
    found = {key: row[name] for key, name in columns.items() if row.get(name) not in (None, "", [])}
    return {key: value for key, value in found.items() if isinstance(value, (str, int, float, list, dict))}


_CODE_BLOCK = "Give the whole program in one ```python code block."

BIG_MATH_COLUMNS = frozenset({"problem", "answer", "source", "domain", "llama8b_solve_rate"})


def mapped(columns: Mapping[str, str], row: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a record from the columns of a user's row; ``messages`` gives system, question and answer."""
    readers: dict[str, Any] = {"question": _text, "answer": _scalar_text, "id": _scalar_text}
    chat = _of_chat(row, columns["messages"]) if "messages" in columns else {}
    own = {name: readers.get(name, _column)(row, column) for name, column in columns.items() if name != "messages"}
    return {**chat, **own}


def _of_chat(row: Mapping[str, Any], column: str) -> dict[str, str]:
    """The user's message, and the system's and the assistant's if there is one; raises RowError for any other chat."""
    messages = _column(row, column)
    try:
        turns = [(message["role"], message["content"]) for message in messages]
    except (TypeError, KeyError):
        raise RowError(f"column {column!r} should be a list of role and content, found {describe(messages)}") from None
    roles = [role for role, _ in turns]
    if roles[roles[:1] == ["system"] :] not in (["user"], ["user", "assistant"]):
        expected = "one user's and one assistant's message, after a system message if there is one"
        raise RowError(f"column {column!r} should be {expected}, found {', '.join(map(str, roles))}")
    if not all(isinstance(content, str) for _, content in turns):
        raise RowError(f"column {column!r} should have text in each content, found another type")
    names = {"system": "system", "user": "question", "assistant": "answer"}
    return {names[role]: content for role, content in turns}


def big_math(row: Mapping[str, Any], number: int) -> Record:
    """Convert a row with ``problem``, ``answer``, ``source``, ``domain``, ``llama8b_solve_rate``.

    The solve rate (of 64 attempts by Llama-3.1-8B) becomes ``metadata["solve_rate"]``; ``metadata["difficulty"]`` is
    one minus it, so that 0 is easiest.
    """
    metadata = {**_optional(row, source="source", domain="domain"), **_solve_rate(_column(row, "llama8b_solve_rate"))}
    return Record(
        f"big_math-{number}", "big_math", "math", _text(row, "problem"), _scalar_text(row, "answer"), None, metadata
    )


def _solve_rate(value: Any) -> dict[str, float]:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return {}
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
        raise RowError(f"column 'llama8b_solve_rate' should be between 0 and 1 or null, found {describe(value)}")
    return {"solve_rate": float(value), "difficulty": 1.0 - value}


# The solutions, most of the data, are not needed.
TACO_COLUMNS = frozenset({"question", "starter_code", "input_output", "time_limit", "difficulty", "source"})
_LEVELS = ("EASY", "MEDIUM", "MEDIUM_HARD", "HARD", "VERY_HARD")
_SECONDS = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*(?:s|sec|secs|second|seconds)?\s*", re.IGNORECASE)


def taco(row: Mapping[str, Any], number: int) -> Record:
    """Convert a row; its tests become ``metadata["tests"]`` of kind ``stdio`` or ``call``.

    Difficulty is the level's position among TACO's five: EASY is 0, VERY_HARD is 1; UNKNOWN_DIFFICULTY sets none.

    Raises:
        RowError: the row is not in TACO's form.
        Ungradable: it has no tests, or tests that JSON cannot represent.
    """
    tests = _tests(_column(row, "input_output"))
    starter = row.get("starter_code") or ""
    if not isinstance(starter, str):
        raise RowError(f"column 'starter_code' should be a string, found {describe(starter)}")
    metadata: dict[str, Any] = {
        "tests": tests,
        "instruction": _instruction(starter, tests.get("entry_point")),
        "grader": "code",
        **_optional(row, source="source"),
    }
    level = row.get("difficulty")
    if level in _LEVELS:
        metadata |= {"level": level, "difficulty": _LEVELS.index(level) / (len(_LEVELS) - 1)}
    elif level not in (None, "", "UNKNOWN_DIFFICULTY"):
        raise RowError(f"column 'difficulty' should be one of {', '.join(_LEVELS)}, found {describe(level)}")
    if (limit := row.get("time_limit")) not in (None, ""):
        match = _SECONDS.fullmatch(str(limit))
        if match is None:
            raise RowError(f"column 'time_limit' should be seconds like '2.0 seconds', found {describe(limit)}")
        metadata["time_limit"] = float(match[1])
    return Record(f"taco-{number}", "taco", "code", _text(row, "question"), "", None, metadata)


def _tests(value: Any) -> dict[str, Any]:
    if value in (None, "", "{}"):
        raise Ungradable("no tests")
    try:
        parsed = parse_json(value, surrogates=True) if isinstance(value, str) else value
    except JsonLimitError as error:
        raise Ungradable(f"tests cannot be read: {error}") from error
    except JsonError as error:
        raise RowError(f"column 'input_output' is not JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise RowError(f"column 'input_output' should hold a JSON object, found {describe(parsed)}")
    inputs, outputs = parsed.get("inputs"), parsed.get("outputs")
    if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
        raise RowError("column 'input_output' should hold 'inputs' and 'outputs', lists of one length")
    if not inputs:
        raise Ungradable("no tests")
    if not (entry_point := parsed.get("fn_name")):
        pairs = zip(map(_stream, inputs), map(_stream, outputs), strict=True)
        return {"kind": "stdio", "cases": [{"input": i, "output": o} for i, o in pairs]}
    if not isinstance(entry_point, str):
        raise RowError(f"column 'input_output': 'fn_name' should be a string, found {describe(entry_point)}")
    if _has_integer_keys(inputs):
        raise Ungradable("an argument is a dictionary with integer keys, which JSON has turned into strings")
    calls = [
        {"arguments": i if isinstance(i, list) else [i], "expected": o}
        for i, o in zip(inputs, _unwrapped(outputs), strict=True)
    ]
    return {"kind": "call", "entry_point": entry_point, "cases": calls}


def _stream(value: Any) -> str:
    """Text of stdin or stdout; some rows hold a list of lines."""
    if isinstance(value, list) and all(isinstance(line, str) for line in value):
        return "\n".join(value)
    if not isinstance(value, str):
        raise RowError(f"column 'input_output': a test's text should be a string, found {describe(value)}")
    return value


def _unwrapped(outputs: list[Any]) -> list[Any]:
    """Remove the one-element list that most call-based problems put around each expected value.

    TACO's own checker accepts both readings of a one-element list.  Here a problem is wrapped if all of its outputs are
    such lists, and plain otherwise.
    """
    wrapped = all(isinstance(output, list) and len(output) == 1 for output in outputs)
    return [output[0] for output in outputs] if wrapped else outputs


def _has_integer_keys(value: Any) -> bool:
    """Whether an argument had integer keys, which JSON turned into strings."""
    if isinstance(value, dict):
        integers = bool(value) and all(re.fullmatch(r"-?[0-9]+", key) for key in value)
        return integers or any(_has_integer_keys(item) for item in value.values())
    return isinstance(value, list) and any(_has_integer_keys(item) for item in value)


def _instruction(starter: str, entry_point: str | None) -> str:
    if entry_point is None and not starter.strip():
        task = "Write a Python program that reads standard input and prints the result to standard output."
    elif starter.strip():
        task = f"Write it in Python, going on from this code:\n```python\n{starter.rstrip()}\n```"
    else:
        task = f"Write it as a Python function named {entry_point}."
    return f"\n\n{task}\n{_CODE_BLOCK}"


# AIME answers are integers from 0 to 999; some publishers leave a degree sign or leading zeros on them.
_AIME_ANSWER = re.compile(r"0*([0-9]{1,3})(?:\.0)?\s*(?:\^?\{?\\?circ\}?|°)?")


def gsm8k(row: Mapping[str, Any], number: int) -> Record:
    """Convert ``question`` and ``answer`` with a last line ``#### gold``, without the gold's thousands separators."""
    head, marker, gold = _text(row, "answer").rpartition("####")
    if not marker or not gold.strip():
        raise RowError(f"column 'answer' should end with '#### ' and the gold answer, found {(head or gold)[-60:]!r}")
    return Record(f"gsm8k-{number}", "gsm8k", "math", _text(row, "question"), gold.strip().replace(",", ""))


def math500(row: Mapping[str, Any], number: int) -> Record:
    """``problem``, ``answer``, ``subject``, ``level`` (1 to 5), ``unique_id``; level 5 is difficulty 1."""
    metadata = _optional(row, source="subject")
    if (level := row.get("level")) is not None:
        if isinstance(level, bool) or not isinstance(level, (int, float)) or level not in range(1, 6):
            raise RowError(f"column 'level' should be an integer from 1 to 5, found {describe(level)}")
        metadata |= {"level": int(level), "difficulty": (int(level) - 1) / 4}
    return Record(
        str(row.get("unique_id") or f"math500-{number}"),
        "math500",
        "math",
        _text(row, "problem"),
        _scalar_text(row, "answer"),
        None,
        metadata,
    )


def aime(dataset: str, row: Mapping[str, Any], number: int) -> Record:
    """Convert a problem and an integer; OpenCompass calls them ``origin_prompt`` and ``gold_answer``."""
    answer = _scalar_text(row, "answer", "Answer", "gold_answer")
    match = _AIME_ANSWER.fullmatch(answer.strip("$ "))
    if match is None:
        raise RowError(f"column 'answer' should be an integer from 0 to 999, found {answer!r}")
    question = _text(row, "origin_prompt", "problem", "Problem", "question")
    return Record(f"{dataset}-{number}", dataset, "math", question, match[1])


def mbpp_sanitized(row: Mapping[str, Any], number: int) -> Record:
    """Convert ``task_id``, ``prompt``, ``test_imports``, ``test_list``; the tests are shown, as is usual with MBPP."""
    imports, asserts, task = _text_list(row, "test_imports"), _text_list(row, "test_list"), _column(row, "task_id")
    if isinstance(task, bool) or not isinstance(task, (int, str)) or not str(task).isdecimal():
        raise RowError(f"column 'task_id' should be a number, found {describe(task)}")
    if not asserts:
        raise Ungradable("no tests")
    shown = "\n".join(asserts)
    metadata = {
        "tests": {"kind": "asserts", "code": "\n".join([*imports, *asserts]), "entry_point": None},
        "instruction": f"\n\nThe code has to pass these tests:\n```python\n{shown}\n```\n{_CODE_BLOCK}",
        "grader": "code",
        "task_id": int(task),
    }
    return Record(f"mbpp-{int(task)}", "mbpp_sanitized", "code", _text(row, "prompt"), "", None, metadata)


def outside_mbpp_test(record: Record) -> str | None:
    """Return why a row is outside MBPP's test split, tasks 11 to 510; None if it is inside."""
    task = record.metadata["task_id"]
    return None if 11 <= task <= 510 else f"task {task} is not in the test split (11 to 510)"


def humaneval(row: Mapping[str, Any], number: int) -> Record:
    """Convert ``task_id``, ``prompt``, ``test``, ``entry_point``; an answer may be the function body alone."""
    entry_point, prompt = _text(row, "entry_point"), _text(row, "prompt")
    metadata = {
        "tests": {
            "kind": "asserts",
            "code": f"{_text(row, 'test')}\ncheck({entry_point})\n",
            "entry_point": entry_point,
        },
        "prompt": prompt,
        "instruction": f"\n\nComplete this Python function. {_CODE_BLOCK}",
        "grader": "code",
    }
    return Record(_text(row, "task_id"), "humaneval", "code", prompt, "", None, metadata)


def simpleqa(row: Mapping[str, Any], number: int) -> Record:
    """Convert ``problem``, ``answer``."""
    answer, metadata = _scalar_text(row, "answer"), {"instruction": SHORT_ANSWER, "grader": "simpleqa"}
    return Record(f"simpleqa-{number}", "simpleqa", "factual", _text(row, "problem"), answer, None, metadata)


def hotpotqa(row: Mapping[str, Any], number: int) -> Record:
    """Convert the authors' JSON, or the hub's copy; the paragraphs of ``context``, if any, stand before the question.

    Raises:
        RowError: the row is in none of these forms.
        Ungradable: the row is of the test split, whose answers are not published.
    """
    if "_id" in row and "answer" not in row:
        raise Ungradable("no gold answer: the test split is not labelled")
    question, answer = _text(row, "question"), _text(row, "answer").strip()
    if not normalise_fact(answer):
        raise Ungradable(f"a gold answer that no answer is compared by: {describe(answer)}")
    paragraphs = _hotpotqa_paragraphs(row.get("context") or [])
    metadata = {"instruction": SHORT_ANSWER, "grader": "factual", **_optional(row, kind="type", level="level")}
    text = "\n\n".join([*paragraphs, question])
    return Record(_text(row, "_id", "id"), "hotpotqa", "factual", text, answer, None, metadata)


def _hotpotqa_paragraphs(context: Any) -> list[str]:
    """``Title: sentences`` of each paragraph; pairs in the authors' files, a mapping of two lists in the hub's."""
    if isinstance(context, Mapping):
        context = list(zip(context.get("title") or [], context.get("sentences") or [], strict=False))
    paragraphs = []
    for paragraph in context:
        if not (isinstance(paragraph, list | tuple) and len(paragraph) == 2 and isinstance(paragraph[1], list)):
            raise RowError(f"column 'context' should hold titles with their sentences, found {describe(paragraph)}")
        title, sentences = paragraph
        if not all(isinstance(text, str) for text in [title, *sentences]):
            raise RowError(f"column 'context' should hold text, found {describe(paragraph)}")
        paragraphs.append(f"{title}: {''.join(sentences).strip()}")
    return paragraphs


def triviaqa(row: Mapping[str, Any], number: int) -> Record:
    """Convert the authors' JSON, or its copy with lower-case names.

    Raises:
        RowError: the row is in none of these forms.
        Ungradable: the row is of the test split, whose answers are not published.
    """
    # The authors' files of the test split leave the column out.
    answer = None if "QuestionId" in row and "Answer" not in row else _column(row, "answer", "Answer")
    forms = ({"value", "aliases"}, {"Value", "Aliases"})
    if answer is not None and not (isinstance(answer, dict) and any(form <= answer.keys() for form in forms)):
        raise RowError(f"column 'answer' should hold 'value' and 'aliases', found {describe(answer)}")
    gold = None if answer is None else answer.get("value", answer.get("Value"))
    if answer is None or gold in ("", "<unk>", None):
        raise Ungradable("no gold answer: the test split is not labelled")
    aliases = [gold, *(answer.get("aliases", answer.get("Aliases")) or []), *(answer.get("HumanAnswers") or [])]
    if not all(isinstance(alias, str) for alias in aliases):
        raise RowError(f"column 'answer': aliases should be strings, found {describe(aliases)}")
    if not any(map(normalise_fact, aliases)):
        raise Ungradable(f"a gold answer that no answer is compared by: {describe(aliases)}")
    metadata: dict[str, Any] = {
        "aliases": [alias for alias in dict.fromkeys(aliases) if alias.strip()],
        "instruction": SHORT_ANSWER,
        "grader": "factual",
        **_optional(row, source="question_source", question_id="question_id"),
        **_optional(row, source="QuestionSource", question_id="QuestionId"),
    }
    # Not the publisher's id: the reading-comprehension files hold a question once for each kind of evidence.
    return Record(f"triviaqa-{number}", "triviaqa", "factual", _text(row, "question", "Question"), gold, None, metadata)
