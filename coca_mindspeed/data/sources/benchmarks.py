"""The paper's eight evaluation sets, each in all published forms."""

import re
from collections.abc import Mapping
from typing import Any

from coca_mindspeed.data.records import Record
from coca_mindspeed.data.sources.fields import (
    RowError,
    Ungradable,
    column,
    describe,
    literal,
    optional,
    scalar_text,
    text,
    text_list,
)
from coca_mindspeed.grading.facts.factual import normalise

_CODE_BLOCK = "Give the whole program in one ```python code block."
_SHORT_ANSWER = "Answer as briefly as possible: the answer itself, without explanation."
# AIME answers are integers from 0 to 999; some publishers leave a degree sign or leading zeros on them.
_AIME_ANSWER = re.compile(r"0*([0-9]{1,3})(?:\.0)?\s*(?:\^?\{?\\?circ\}?|°)?")


def gsm8k(row: Mapping[str, Any], number: int) -> Record:
    """Convert ``question`` and ``answer`` with a last line ``#### gold``, without the gold's thousands separators."""
    head, marker, gold = text(row, "answer").rpartition("####")
    if not marker or not gold.strip():
        raise RowError(f"column 'answer' should end with '#### ' and the gold answer, found {(head or gold)[-60:]!r}")
    return Record(f"gsm8k-{number}", "gsm8k", "math", text(row, "question"), gold.strip().replace(",", ""))


def math500(row: Mapping[str, Any], number: int) -> Record:
    """``problem``, ``answer``, ``subject``, ``level`` (1 to 5), ``unique_id``; level 5 is difficulty 1."""
    metadata = optional(row, source="subject")
    if (level := row.get("level")) is not None:
        if isinstance(level, bool) or not isinstance(level, (int, float)) or level not in range(1, 6):
            raise RowError(f"column 'level' should be an integer from 1 to 5, found {describe(level)}")
        metadata |= {"level": int(level), "difficulty": (int(level) - 1) / 4}
    return Record(
        str(row.get("unique_id") or f"math500-{number}"),
        "math500",
        "math",
        text(row, "problem"),
        scalar_text(row, "answer"),
        None,
        metadata,
    )


def aime(dataset: str, row: Mapping[str, Any], number: int) -> Record:
    """Convert a problem and an integer; OpenCompass calls them ``origin_prompt`` and ``gold_answer``."""
    answer = scalar_text(row, "answer", "Answer", "gold_answer")
    match = _AIME_ANSWER.fullmatch(answer.strip("$ "))
    if match is None:
        raise RowError(f"column 'answer' should be an integer from 0 to 999, found {answer!r}")
    question = text(row, "origin_prompt", "problem", "Problem", "question")
    return Record(f"{dataset}-{number}", dataset, "math", question, match[1])


def mbpp_sanitized(row: Mapping[str, Any], number: int) -> Record:
    """Convert ``task_id``, ``prompt``, ``test_imports``, ``test_list``; the tests are shown, as is usual with MBPP."""
    imports, asserts = text_list(row, "test_imports"), text_list(row, "test_list")
    if not asserts:
        raise Ungradable("no tests")
    shown = "\n".join(asserts)
    metadata = {
        "tests": {"kind": "asserts", "code": "\n".join([*imports, *asserts]), "entry_point": None},
        "instruction": f"\n\nThe code has to pass these tests:\n```python\n{shown}\n```\n{_CODE_BLOCK}",
        "grader": "code",
        "task_id": _task_id(row),
    }
    return Record(f"mbpp-{metadata['task_id']}", "mbpp_sanitized", "code", text(row, "prompt"), "", None, metadata)


def outside_mbpp_test(record: Record) -> str | None:
    """MBPP's test split is tasks 11 to 510."""
    task = record.metadata["task_id"]
    return None if 11 <= task <= 510 else f"task {task} is not in the test split (11 to 510)"


def _task_id(row: Mapping[str, Any]) -> int:
    value = column(row, "task_id")
    if isinstance(value, bool) or not isinstance(value, (int, str)) or not str(value).isdecimal():
        raise RowError(f"column 'task_id' should be a number, found {describe(value)}")
    return int(value)


def humaneval(row: Mapping[str, Any], number: int) -> Record:
    """Convert ``task_id``, ``prompt``, ``test``, ``entry_point``; an answer may be the function body alone."""
    entry_point, prompt = text(row, "entry_point"), text(row, "prompt")
    metadata = {
        "tests": {
            "kind": "asserts",
            "code": f"{text(row, 'test')}\ncheck({entry_point})\n",
            "entry_point": entry_point,
        },
        "prompt": prompt,
        "instruction": f"\n\nComplete this Python function. {_CODE_BLOCK}",
        "grader": "code",
    }
    return Record(text(row, "task_id"), "humaneval", "code", prompt, "", None, metadata)


def simpleqa(row: Mapping[str, Any], number: int) -> Record:
    """Convert ``metadata`` (a Python dictionary as text), ``problem``, ``answer``."""
    metadata: dict[str, Any] = {"instruction": _SHORT_ANSWER, "grader": "simpleqa"}
    if details := row.get("metadata"):
        parsed = literal(details, "metadata", "a dictionary") if isinstance(details, str) else details
        if not isinstance(parsed, dict):
            raise RowError(f"column 'metadata' should be a dictionary, found {describe(details)}")
        metadata |= optional(parsed, source="topic", answer_type="answer_type")
    return Record(
        f"simpleqa-{number}", "simpleqa", "factual", text(row, "problem"), scalar_text(row, "answer"), None, metadata
    )


def triviaqa(row: Mapping[str, Any], number: int) -> Record:
    """Convert the authors' JSON, its copy with lower-case names, or OpenCompass's question and list of answers.

    Raises:
        RowError: the row is in none of these forms.
        Ungradable: the row is of the test split, whose answers are not published.
    """
    # The authors' files of the test split leave the column out.
    answer = None if "QuestionId" in row and "Answer" not in row else column(row, "answer", "Answer")
    if isinstance(answer, str) and answer.lstrip().startswith("["):  # OpenCompass's trivia-dev.qa.csv
        answer = literal(answer, "answer", "a list of answers")
    if isinstance(answer, dict):
        gold = column(answer, "value", "Value")
        aliases = [gold, *(column(answer, "aliases", "Aliases") or []), *(answer.get("HumanAnswers") or [])]
    elif isinstance(answer, list) and answer:
        gold, aliases = answer[0], answer
    elif answer is None:
        raise Ungradable("no gold answer: the test split is not labelled")
    else:
        raise RowError(f"column 'answer' should hold a value and aliases, or a list, found {describe(answer)}")
    if gold in ("", "<unk>", None):
        raise Ungradable("no gold answer: the test split is not labelled")
    if not all(isinstance(alias, str) for alias in aliases):
        raise RowError(f"column 'answer': aliases should be strings, found {describe(aliases)}")
    if not any(map(normalise, aliases)):
        raise Ungradable(f"a gold answer that no answer is compared by: {describe(aliases)}")
    metadata: dict[str, Any] = {
        "aliases": [alias for alias in dict.fromkeys(aliases) if alias.strip()],
        "instruction": _SHORT_ANSWER,
        "grader": "factual",
        **optional(row, source="question_source", question_id="question_id"),
        **optional(row, source="QuestionSource", question_id="QuestionId"),
    }
    # Not the publisher's id: the reading-comprehension files hold a question once for each kind of evidence.
    return Record(f"triviaqa-{number}", "triviaqa", "factual", text(row, "question", "Question"), gold, None, metadata)
