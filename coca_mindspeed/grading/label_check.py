"""Label check: refuse records whose gold answers cannot be used, before a run loads its model."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from coca_mindspeed.data.records import Record, RecordError, record_line
from coca_mindspeed.errors import DataError
from coca_mindspeed.grading.verdict import MeasuredGrader


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
