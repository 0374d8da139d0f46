"""A grader that answers whatever happens."""

from collections.abc import Sequence

import pytest

from coca_mindspeed.data.records import Record
from coca_mindspeed.errors import DataError, GradingError
from coca_mindspeed.grading.own import FaultTolerantGrader
from coca_mindspeed.grading.verdict import Outcome, Verdict


@pytest.mark.parametrize(
    ("failure", "gold_fails_too", "outcome"),
    [
        (RecursionError("deep"), False, Outcome.WRONG),
        (ValueError("Exceeds the limit (4300 digits)"), False, Outcome.WRONG),
        (ValueError("of the grader itself"), True, Outcome.UNGRADABLE),
        (GradingError("the judge does not grade"), False, Outcome.UNGRADABLE),
        (DataError("no aliases"), False, Outcome.UNGRADABLE),
        (OSError("no process"), False, Outcome.UNGRADABLE),
        (MemoryError(), False, Outcome.UNGRADABLE),
    ],
)
def test_whose_fault_a_failure_is(failure: Exception, gold_fails_too: bool, outcome: Outcome):
    class Failing(_Grader):
        def grade(self, records: Sequence[Record], answers: Sequence[str]) -> list[Verdict]:
            if self.bad in answers or gold_fails_too:
                raise failure
            return [Verdict(Outcome.RIGHT) for _ in answers]

    record = Record(id="a", dataset="d", category="math", question="q", answer="1")
    assert FaultTolerantGrader(Failing("b")).grade([record], ["b"])[0].outcome is outcome


class _Grader:
    def __init__(self, bad: str) -> None:
        self.bad, self.calls, self.closed = bad, 0, False

    def grade(self, records: Sequence[Record], answers: Sequence[str]) -> list[Verdict]:
        self.calls += 1
        if self.bad in answers:
            raise OSError("out of memory")
        return [Verdict(Outcome.RIGHT) for _ in answers]

    def close(self) -> None:
        self.closed = True


def test_a_failure_is_its_own_answers_alone_and_says_why():
    grader = _Grader("b")
    steady = FaultTolerantGrader(grader)
    records = [Record(id=a, dataset="d", category="math", question="q", answer="1") for a in "abc"]
    verdicts = steady.grade(records, ["a", "b", "c"])
    assert [v.outcome for v in verdicts] == [Outcome.RIGHT, Outcome.UNGRADABLE, Outcome.RIGHT]
    assert verdicts[1].reason == "the grader failed: OSError: out of memory"
    grader.calls = 0
    many = ["b" if n == 300 else "a" for n in range(512)]
    outcomes = [v.outcome for v in steady.grade([records[0]] * 512, many)]
    assert outcomes == [Outcome.UNGRADABLE if a == "b" else Outcome.RIGHT for a in many]
    assert grader.calls == 1 + 2 * 9  # halves, and not each for itself
    grader.calls = 0
    assert len(steady.grade(records[:1], ["a"])) == 1
    assert grader.calls == 1, "what does not fail is graded once"
    assert steady.grade([], []) == []
    steady.close()
    assert grader.closed


def test_the_log_has_one_trace_of_each_failure(caplog: pytest.LogCaptureFixture):
    steady = FaultTolerantGrader(_Grader("b"))
    record = Record(id="a", dataset="d", category="math", question="q", answer="1")
    for _ in range(3):
        steady.grade([record], ["b"])
    assert [bool(entry.exc_info) for entry in caplog.records] == [True, False, False]
    assert all("OSError: out of memory" in entry.getMessage() for entry in caplog.records)
