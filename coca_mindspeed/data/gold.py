"""Gold answers, checked when data is prepared and not in the middle of a run.

The seam through which the graders come in: ``gold_checker(MathGrader(...).gold_problems)`` checks with the grader's
own parser and its workers; without it, ``math-verify`` is asked in this process.
"""

import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from coca_mindspeed.data.records import Record

#: For each record, why its gold cannot be graded against, or an empty string.
GoldChecker = Callable[[Sequence[Record]], Sequence[str]]
#: For each gold answer of mathematics, why it cannot be parsed, or an empty string.
MathGoldProblems = Callable[[Sequence[str]], Sequence[str]]

_PLAIN_NUMBER = re.compile(r"-?(?:[0-9]+(?:\.[0-9]+)?|[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+/[0-9]*[1-9][0-9]*)")
_LONGEST = 2_000  # characters; longer ones are no answers, and parsing takes minutes
_TEST_KEYS = {"asserts": "code", "stdio": "cases", "call": "cases"}


def gold_checker(math: MathGoldProblems | None = None) -> GoldChecker:
    """The checker of all categories: math parses, code has tests, factual answers have a name to match.

    Args:
        math: asked for all math records of a batch at once; None for :func:`math_gold_problems`.
    """
    ask = math_gold_problems if math is None else math

    def check(records: Sequence[Record]) -> list[str]:
        problems = [_other_problem(record) for record in records]
        places = [index for index, record in enumerate(records) if record.category == "math"]
        for index, problem in zip(places, ask([records[index].answer for index in places]), strict=True):
            problems[index] = problem
        return problems

    return check


def math_gold_problems(golds: Sequence[str]) -> list[str]:
    """Why ``math-verify`` cannot read each gold answer, or an empty string; plain numbers are not given to it.

    Its time limit is a signal, so this has to run in the main thread.
    """
    return [_math_gold_problem(gold) for gold in golds]


@lru_cache(maxsize=1 << 16)
def _math_gold_problem(gold: str) -> str:
    stripped = gold.strip()
    if not stripped:
        return "empty gold answer"
    if len(stripped) > _LONGEST:
        return f"gold answer longer than {_LONGEST} characters"
    if _PLAIN_NUMBER.fullmatch(stripped):
        return ""
    from math_verify import parse

    # It reads percentages in a formula but not in a box, and most of the rest in both.
    forms = (f"\\boxed{{{stripped}}}", f"${stripped.strip('$')}$")
    parsed = any(parse(form, fallback_mode="no_fallback", parsing_timeout=5) for form in forms)
    return "" if parsed else "math-verify cannot parse the gold answer"


def _other_problem(record: Record) -> str:
    if record.category == "code":
        return _code_problem(record.metadata.get("tests"))
    if record.category == "factual":
        return "" if record.answer.strip() else "empty gold answer"
    return "" if record.category == "math" else f"unknown category {record.category!r}"


def _code_problem(tests: Any) -> str:
    kind = tests.get("kind") if isinstance(tests, dict) else None
    if kind not in _TEST_KEYS:
        return f"no tests of a known kind ({', '.join(_TEST_KEYS)})"
    return "" if tests.get(_TEST_KEYS[kind]) else "no tests"
