"""A grader that answers whatever happens, for loops in which an error would cost more than the answer."""

import logging
from collections.abc import Sequence

from coca_mindspeed.data.records import Record
from coca_mindspeed.errors import CocaError
from coca_mindspeed.grading.verdict import Grader, Outcome, Verdict

logger = logging.getLogger(__name__)


# Errors that a grader raises itself, and errors of the system, are not the answer's fault.
_NOT_THE_ANSWERS = (CocaError, OSError, MemoryError)


class SteadyGrader:
    """Gives a verdict where another grader fails on an answer, with the failure as the reason.

    An answer at which it fails otherwise than by an error of its own or of the system's is wrong, unless it fails at
    the gold answer as well: a policy must not be able to leave its group by writing what breaks a grader.  Every other
    failure makes the answer ungradable.  What a grader cannot do at all should be found before the first answer, by
    building it and by its ``check``.
    """

    def __init__(self, grader: Grader) -> None:
        self._grader = grader

    def grade(self, records: Sequence[Record], answers: Sequence[str]) -> list[Verdict]:
        """See :class:`~coca_mindspeed.grading.verdict.Grader`; an answer fails alone, not with its neighbours.

        Which one it is, halves of what fails tell: the others are graded side by side, as they would have been.  Where
        all fail, that is twice as many calls as answers.
        """
        if not records:
            return []
        try:
            return self._grader.grade(records, answers)
        except Exception as failure:
            if (half := len(records) // 2) > 0:
                first = self.grade(records[:half], answers[:half])
                return first + self.grade(records[half:], answers[half:])
            logger.warning("record %r of %r: the grader failed", records[0].id, records[0].dataset, exc_info=True)
            answers_fault = not isinstance(failure, _NOT_THE_ANSWERS) and self._grades(records[0])
            outcome = Outcome.WRONG if answers_fault else Outcome.UNGRADABLE
            return [Verdict(outcome, f"the grader failed: {type(failure).__name__}: {failure}")]

    def _grades(self, record: Record) -> bool:
        """Whether the other grader has a verdict on the record's gold answer."""
        try:
            return self._grader.grade([record], [record.answer])[0].outcome is not Outcome.UNGRADABLE
        except Exception:  # noqa: BLE001  # as above
            return False

    def close(self) -> None:
        """The other grader's own."""
        self._grader.close()
