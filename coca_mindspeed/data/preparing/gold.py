"""Gold answers, checked when data is prepared and not in the middle of a run, by the graders themselves."""

from collections.abc import Callable, Sequence

from coca_mindspeed.data.records import Record
from coca_mindspeed.errors import DataError, GradingError
from coca_mindspeed.grading.registry import grader_class, grader_name

#: For each record, why its gold cannot be graded against, or an empty string.
GoldChecker = Callable[[Sequence[Record]], Sequence[str]]
#: For each gold answer of mathematics, why it cannot be parsed, or an empty string.
MathGoldProblems = Callable[[Sequence[str]], Sequence[str]]


def gold_checker(math: MathGoldProblems) -> GoldChecker:
    """The checker of all records: what each one's grader asks for is there, and mathematics parses.

    Args:
        math: :meth:`~coca_mindspeed.grading.mathematics.math.MathGrader.gold_problems`, asked for all math records
            of a batch at once, because it parses in processes of its own.
    """

    def check(records: Sequence[Record]) -> list[str]:
        problems = [_problem(record) for record in records]
        places = [index for index, problem in enumerate(problems) if problem is None]
        parsed = dict(zip(places, math([records[index].answer for index in places]), strict=True))
        return [parsed[index] if problem is None else problem for index, problem in enumerate(problems)]

    return check


def _problem(record: Record) -> str | None:
    """Why the record's grader would refuse it, or an empty string; None where its answer has yet to be parsed."""
    try:
        name = grader_name(record)
        if name == "math":
            return None
        grader_class(name).check([record])
    except (DataError, GradingError) as error:
        # Without the record's name: reasons are counted.
        return str(error).removeprefix(f"record {record.id!r} of {record.dataset!r}: ")
    return "" if name == "code" or record.answer.strip() else "empty gold answer"  # programs have tests instead
