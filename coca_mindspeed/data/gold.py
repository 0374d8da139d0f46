"""Gold answers, checked when data is prepared and not in the middle of a run.

A checker is any callable that says why a record's gold cannot be graded against, or None: that is the seam through
which the graders come in (``prepare`` takes one).
"""

import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from coca_mindspeed.data.records import Record

GoldChecker = Callable[[Record], str | None]

_PLAIN_NUMBER = re.compile(r"-?(?:[0-9]+(?:\.[0-9]+)?|[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+/[0-9]*[1-9][0-9]*)")
_LONGEST = 2_000  # characters; longer ones are no answers, and parsing takes minutes
_TEST_KEYS = {"asserts": "code", "stdio": "cases", "call": "cases"}


def check_gold(record: Record) -> str | None:
    """The checker of each category: math parses, code has tests, factual answers have a name to match."""
    if record.category == "math":
        return math_gold(record.answer)
    if record.category == "code":
        return _code_gold(record.metadata.get("tests"))
    if record.category == "factual":
        return None if record.answer.strip() else "empty gold answer"
    return f"unknown category {record.category!r}; expected math, code or factual"


@lru_cache(maxsize=1 << 16)
def math_gold(answer: str) -> str | None:
    """Why ``math-verify`` cannot read a gold answer, or None; plain numbers are not even given to it.

    Uses signals for its time limit, so it has to run in the main thread.
    """
    if not answer.strip():
        return "empty gold answer"
    if len(answer) > _LONGEST:
        return f"gold answer longer than {_LONGEST} characters"
    if _PLAIN_NUMBER.fullmatch(answer.strip()):
        return None
    from math_verify import parse

    parsed = parse(f"\\boxed{{{answer}}}", fallback_mode="no_fallback", parsing_timeout=5)
    return None if parsed else "math-verify cannot parse the gold answer"


def _code_gold(tests: Any) -> str | None:
    kind = tests.get("kind") if isinstance(tests, dict) else None
    if kind not in _TEST_KEYS:
        return f"no tests of a known kind ({', '.join(_TEST_KEYS)})"
    return None if tests.get(_TEST_KEYS[kind]) else "no tests"
