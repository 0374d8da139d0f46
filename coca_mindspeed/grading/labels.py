"""The label check of preparation: whether each record's gold answer can be graded."""

from collections.abc import Callable, Sequence

from coca_mindspeed.data.filters import LabelChecker
from coca_mindspeed.data.records import Record
from coca_mindspeed.errors import DataError, GradingError
from coca_mindspeed.grading.registry import grader_class, grader_name

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
