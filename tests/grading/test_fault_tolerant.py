"""A grader that answers whatever happens."""

import pytest

from coca_mindspeed.data.records import Record
from coca_mindspeed.errors import DataError, GradingError
from coca_mindspeed.grading.custom import FaultTolerantGrader
from coca_mindspeed.grading.verdict import Outcome, Verdict

RIGHT, WRONG, UNGRADABLE = Outcome.RIGHT, Outcome.WRONG, Outcome.UNGRADABLE
RECORD = Record(id="a", dataset="d", category="math", question="q", answer="1")


class _Grader:
    """Finds every answer right, and raises ``failure`` for a batch with one for which ``fails`` holds."""

    def __init__(self, failure, fails="b".__eq__):
        self.failure, self.fails, self.calls, self.closed = failure, fails, 0, False

    def grade(self, records, answers):
        self.calls += 1
        if any(map(self.fails, answers)):
            raise self.failure
        return [Verdict(RIGHT) for _ in answers]

    def close(self):
        self.closed = True


@pytest.mark.parametrize(
    ("failure", "outcome"),
    [
        (RecursionError("deep"), WRONG),
        (ValueError("Exceeds the limit (4300 digits)"), WRONG),
        (GradingError("the judge does not grade"), UNGRADABLE),
        (DataError("no aliases"), UNGRADABLE),
        (OSError("no process"), UNGRADABLE),
        (MemoryError(), UNGRADABLE),
    ],
)
def test_whose_fault_a_failure_is(failure, outcome):
    for fails, expected in (("b".__eq__, outcome), (lambda answer: True, UNGRADABLE)):  # the gold answer fails too
        assert FaultTolerantGrader(_Grader(failure, fails)).grade([RECORD], ["b"])[0].outcome is expected


def test_a_failure_is_its_own_answers_alone_and_says_why(caplog):
    grader = _Grader(OSError("out of memory"))
    steady = FaultTolerantGrader(grader)
    verdicts = steady.grade([RECORD] * 3, ["a", "b", "c"])
    assert [v.outcome for v in verdicts] == [RIGHT, UNGRADABLE, RIGHT]
    assert verdicts[1].reason == "the grader failed: OSError: out of memory"
    grader.calls = 0
    many = ["b" if n == 300 else "a" for n in range(512)]
    assert [v.outcome for v in steady.grade([RECORD] * 512, many)] == [UNGRADABLE if a == "b" else RIGHT for a in many]
    assert grader.calls == 1 + 2 * 9  # halves, and not each for itself
    grader.calls = 0
    assert len(steady.grade([RECORD], ["a"])) == 1
    assert grader.calls == 1, "what does not fail is graded once"
    assert steady.grade([], []) == []
    # The log has one trace of each failure.
    assert [bool(entry.exc_info) for entry in caplog.records] == [True, False]
    assert all("OSError: out of memory" in entry.getMessage() for entry in caplog.records)
    steady.close()
    assert grader.closed
