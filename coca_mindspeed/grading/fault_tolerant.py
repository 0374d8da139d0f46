import logging
from collections.abc import Sequence

from coca_mindspeed.data.records import Record
from coca_mindspeed.errors import CocaError, GradingError
from coca_mindspeed.grading.verdict import Grader, Outcome, Verdict

logger = logging.getLogger(__name__)
# Errors that a grader raises itself, and system errors.
_NOT_THE_ANSWERS_FAULT = (CocaError, OSError, MemoryError)


class BrokenGraderError(GradingError):
    """A grader does not keep its protocol, whatever the answer: it has to be mended, and nothing more is graded."""


class FaultTolerantGrader:
    """Wraps a grader; an exception but :class:`BrokenGraderError` becomes a verdict with the exception as the reason.

    If the exception is neither the grader's own nor the system's, and the gold answer can be graded, the answer is
    wrong: a policy must not gain by breaking the grader. Otherwise it is ungradable.
    """

    def __init__(self, grader: Grader) -> None:
        self._grader = grader
        self._seen: set[tuple[str, str]] = set()  # failures that the log has with their traceback

    def grade(self, records: Sequence[Record], answers: Sequence[str]) -> list[Verdict]:
        """Find a failing answer by bisection: at most twice as many calls as answers."""
        if not records:
            return []
        try:
            return self._grader.grade(records, answers)
        except BrokenGraderError:
            raise
        except Exception as failure:
            if (half := len(records) // 2) > 0:
                first = self.grade(records[:half], answers[:half])
                return first + self.grade(records[half:], answers[half:])
            kind, record = (type(failure).__name__, str(failure)), records[0]
            trace = failure if kind not in self._seen else None  # one trace of each failure
            self._seen.add(kind)
            logger.warning(
                "record %r of %r: the grader failed: %s: %s", record.id, record.dataset, *kind, exc_info=trace
            )
            answers_fault = not isinstance(failure, _NOT_THE_ANSWERS_FAULT) and self._grades(records[0])
            outcome = Outcome.WRONG if answers_fault else Outcome.UNGRADABLE
            return [Verdict(outcome, f"the grader failed: {type(failure).__name__}: {failure}")]

    def _grades(self, record: Record) -> bool:
        try:
            return self._grader.grade([record], [record.answer])[0].outcome is not Outcome.UNGRADABLE
        except Exception:  # noqa: BLE001  # as above
            return False

    def close(self) -> None:
        self._grader.close()
