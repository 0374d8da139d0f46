"""Gold answers, checked when data is prepared and not in the middle of a run.

The seam through which the graders come in: ``gold_checker(MathGrader(...).gold_problems)`` checks with the grader's
own parser and its workers; without it, ``math-verify`` is asked in this process.
"""

import re
from collections.abc import Callable, Sequence
from functools import lru_cache

from coca_mindspeed.data.records import Record
from coca_mindspeed.errors import DataError, GradingError
from coca_mindspeed.grading.facts.factual import aliases_of
from coca_mindspeed.grading.programs.extraction import build_job, time_limit
from coca_mindspeed.grading.registry import grader_name

#: For each record, why its gold cannot be graded against, or an empty string.
GoldChecker = Callable[[Sequence[Record]], Sequence[str]]
#: For each gold answer of mathematics, why it cannot be parsed, or an empty string.
MathGoldProblems = Callable[[Sequence[str]], Sequence[str]]

_PLAIN_NUMBER = re.compile(r"-?(?:[0-9]+(?:\.[0-9]+)?|[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+/[0-9]*[1-9][0-9]*)")
_LONGEST = 2_000  # characters; longer ones are no answers, and parsing takes minutes


def gold_checker(math: MathGoldProblems | None = None) -> GoldChecker:
    """The checker of all records: mathematics parses, and what other graders need is there, by their own checks.

    Args:
        math: asked for all math records of a batch at once; None for :func:`math_gold_problems`.
    """
    ask = math_gold_problems if math is None else math

    def check(records: Sequence[Record]) -> list[str]:
        graders = [_grader(record) for record in records]
        problems = [why or _other_problem(record, name) for record, (name, why) in zip(records, graders, strict=True)]
        places = [index for index, (name, _) in enumerate(graders) if name == "math"]
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


def _grader(record: Record) -> tuple[str, str]:
    """``(name of its grader, why it has none)``, one of them empty."""
    try:
        return grader_name(record), ""
    except GradingError as error:
        return "", _of_any_record(str(error), record)


def _other_problem(record: Record, grader: str) -> str:
    """Why a grader other than that of mathematics would refuse the record, by its own checks."""
    try:
        if grader == "code":
            build_job(record, "")
            time_limit(record, default=1.0)
        elif grader == "factual":
            aliases_of(record)
    except DataError as error:
        return _of_any_record(str(error), record)
    return "" if grader == "code" or record.answer.strip() else "empty gold answer"


def _of_any_record(message: str, record: Record) -> str:
    """A grader's message without the record's name: reasons are counted."""
    return message.removeprefix(f"record {record.id!r} of {record.dataset!r}: ")
