"""Label check: refuse records whose gold answers cannot be used, and notice a grader that does not fit them."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from coca_mindspeed.data.records import Record, RecordError, default_category, record_line
from coca_mindspeed.errors import DataError
from coca_mindspeed.grading.factual import names_answer
from coca_mindspeed.grading.registry import grader_name
from coca_mindspeed.grading.verdict import MeasuredGrader, Outcome, Verdict

_MANY = 0.25  # share of answers that name the gold answer and are wrong


def check_records(grader: MeasuredGrader, sources: Mapping[Path | str, Sequence[Record]]) -> None:
    """Check all records of a run at once.

    Args:
        sources: records by file, or by the name of their set if they come from no file.

    Raises:
        DataError: a record lacks what its answers are graded by; names file and line.
        GradingError: something that grading needs is missing.
    """
    try:
        grader.check([record for records in sources.values() for record in records])
    except RecordError as error:
        raise DataError(f"{_place(error.record, sources)}{error}") from error


def _place(record: Record, sources: Mapping[Path | str, Sequence[Record]]) -> str:
    for source, records in sources.items():
        for row, other in enumerate(records, start=1):
            if other is record:
                if isinstance(source, str):
                    return f"{source}: row {row}: "
                line = record_line(source, record)
                return f"{source}: " if line is None else f"{source}:{line}: "
    return ""


def misfit_warnings(
    grader: str,
    records: Sequence[Record],
    answers: Sequence[str],
    verdicts: Sequence[Verdict],
    fixes: Mapping[str, str],
) -> list[str]:
    """Return a warning for each grader that finds many answers wrong although they name the gold answer in words.

    ``grader`` is the grader's name, ``auto`` by record; ``fixes`` tells for ``factual`` and ``math`` what to set.
    """
    named = dict.fromkeys(fixes, 0)
    for record, answer, verdict in zip(records, answers, verdicts, strict=True):
        name = grader_name(record) if grader == "auto" else grader
        in_words = name == "factual" or (name == "math" and default_category(record.answer) == "factual")
        if in_words and verdict.outcome is Outcome.WRONG:
            named[name] += names_answer(record, answer)
    return [
        f"warning: {named[name]} of {len(records)} name the gold answer and are graded wrong by {name}; {fix} "
        "(docs/grading.md)"
        for name, fix in fixes.items()
        if records and named[name] >= _MANY * len(records)
    ]
