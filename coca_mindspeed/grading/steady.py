"""A grader that answers whatever happens, for loops in which an error would cost more than the answer."""

import logging
from collections.abc import Sequence

from coca_mindspeed.data.records import Record
from coca_mindspeed.grading.verdict import Grader, Outcome, Verdict

logger = logging.getLogger(__name__)


class SteadyGrader:
    """Calls an answer ungradable where another grader fails on it, with the failure as the reason.

    What a grader cannot do at all should be found before the first answer, by building it and by its ``check``.
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
            return [Verdict(Outcome.UNGRADABLE, f"the grader failed: {type(failure).__name__}: {failure}")]

    def close(self) -> None:
        """The other grader's own."""
        self._grader.close()
