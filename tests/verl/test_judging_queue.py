"""Responses that arrive one by one: judged as every engine judges them, together, and each for itself."""

import shutil
import threading
import time
from collections.abc import Sequence

import pytest
import torch

from coca_mindspeed.algorithm.boundary import TokenText
from coca_mindspeed.algorithm.parsing import ResponseParser
from coca_mindspeed.data.records import Record
from coca_mindspeed.grading.exact import ExactGrader
from coca_mindspeed.grading.fault_tolerant import FaultTolerantGrader
from coca_mindspeed.grading.registry import build_grader
from coca_mindspeed.grading.verdict import Outcome, Verdict
from coca_mindspeed.local.tiny_model import tiny_tokenizer
from coca_mindspeed.scoring.responses import ResponseJudge
from coca_mindspeed.utils.tokenization import token_text
from coca_mindspeed.verl import reward_queue as judging_queue
from coca_mindspeed.verl.reward_queue import JudgedRow, JudgingQueue
from tests.verl.configurations import record

TOKENIZER = tiny_tokenizer("$")


def tokens(text: str) -> torch.Tensor:
    return torch.tensor(TOKENIZER(text, add_special_tokens=False)["input_ids"])


class Counting:
    """Grades exactly, and keeps how many answers came at once; waits for the first ones to be let go."""

    def __init__(self) -> None:
        self.batches: list[int] = []
        self.go = threading.Event()

    def grade(self, records: Sequence[Record], answers: Sequence[str]) -> list[Verdict]:
        self.batches.append(len(records))
        assert self.go.wait(240)
        return ExactGrader().grade(records, answers)

    def close(self) -> None:
        pass


def queue_of(grader: object, require_evaluated: bool = False) -> JudgingQueue:
    text = token_text(TOKENIZER, len(TOKENIZER))
    return JudgingQueue(ResponseJudge(text, ResponseParser(), grader, 16), "coca", require_evaluated)  # type: ignore[arg-type]


def test_each_response_is_judged_by_its_own_tokens():
    grader = Counting()
    grader.go.set()
    queue = queue_of(grader)
    said = ["<confidence>0.8</confidence>2", "<confidence>.3</confidence>5", "12", "<confidence>1.5</confidence>4"]
    rows = [queue.submit(tokens(text), record(i)).result(240) for i, text in enumerate(said, start=1)]
    queue.close()
    assert [row.prediction.confidence for row in rows] == [0.8, 0.3, None, None]
    assert [row.trained.correct for row in rows] == [True, False, False, False]
    assert [row.confidence_tokens for row in rows] == [5, 4, 2, 6]
    assert [row.prediction.tokens for row in rows] == [6, 5, 2, 6]
    assert rows[0].prediction.response == said[0]
    assert rows[0].prediction.gold == "2"
    assert rows[0].prediction.method == "coca"


def test_what_arrives_meanwhile_is_graded_together():
    grader = Counting()
    queue = queue_of(grader)
    results = [queue.submit(tokens("<confidence>0.8</confidence>2"), record(1))]
    while not grader.batches:
        time.sleep(0.01)  # until the first one is being graded, alone
    results += [queue.submit(tokens("<confidence>0.8</confidence>2"), record(1)) for _ in range(20)]
    grader.go.set()
    assert all(result.result(240).trained.correct for result in results)
    queue.close()
    assert grader.batches == [1, 20]


def test_a_response_that_nobody_waits_for_any_more_leaves_its_neighbours_theirs():
    """A session of verl's that fails cancels what it awaits."""
    grader = Counting()
    queue = queue_of(grader)
    being_graded = queue.submit(tokens("<confidence>0.8</confidence>2"), record(1))
    while not grader.batches:
        time.sleep(0.01)
    waiting = [queue.submit(tokens("<confidence>0.8</confidence>2"), record(1)) for _ in range(3)]
    assert waiting[0].cancel()
    assert not being_graded.cancel(), "it is being graded, and its result will come"
    grader.go.set()
    assert all(result.result(30).trained.correct for result in [being_graded, *waiting[1:]])
    queue.close()
    assert grader.batches == [1, 2]


def test_what_arrives_a_moment_later_is_waited_for(monkeypatch):
    monkeypatch.setattr(judging_queue, "_GATHERING_SECONDS", 1.0)
    grader = Counting()
    grader.go.set()
    queue = queue_of(grader)
    results = [queue.submit(tokens("<confidence>0.8</confidence>2"), record(1)) for _ in range(20)]
    assert all(result.result(240).trained.correct for result in results)
    queue.close()
    assert grader.batches == [20]


def test_an_answer_at_which_the_grader_fails_is_ungradable_and_its_neighbours_are_not():
    class Failing:
        def grade(self, records: Sequence[Record], answers: Sequence[str]) -> list[Verdict]:
            if any(each.id == "q3" for each in records):
                raise ValueError("three")
            return ExactGrader().grade(records, answers)

        def close(self) -> None:
            pass

    queue = queue_of(FaultTolerantGrader(Failing()))
    results = [queue.submit(tokens(f"<confidence>0.8</confidence>{i + 1}"), record(i)) for i in range(6)]
    rows = [result.result(240) for result in results]
    queue.close()
    outcomes = [row.trained.outcome for row in rows]
    assert outcomes == [Outcome.RIGHT] * 3 + [Outcome.UNGRADABLE] + [Outcome.RIGHT] * 2
    assert rows[3].trained.reason == "the grader failed: ValueError: three"
    assert not rows[3].prediction.correct


def test_training_may_be_stricter_than_an_evaluation():
    class Right:
        def grade(self, records: Sequence[Record], answers: Sequence[str]) -> list[Verdict]:
            return [Verdict(Outcome.RIGHT)] * len(records)

        def close(self) -> None:
            pass

    restated = record(1, question="Compute 1+1=", metadata={"grader": "math"})
    for required, trained in ((True, False), (False, True)):
        queue = queue_of(Right(), require_evaluated=required)
        row = queue.submit(tokens("<confidence>0.8</confidence>$1+1$"), restated).result(240)
        queue.close()
        assert row.prediction.correct
        assert row.trained.correct is trained


def test_a_token_that_cannot_be_fails_its_response_alone_of_later_ones():
    grader = Counting()
    grader.go.set()
    queue = queue_of(grader)
    with pytest.raises((IndexError, ValueError)):
        queue.submit(torch.tensor([10_000]), record(1)).result(240)
    assert queue.submit(tokens("<confidence>0.8</confidence>2"), record(1)).result(240).trained.correct
    queue.close()


def test_columns_survive_their_way_through_verl():
    grader = Counting()
    grader.go.set()
    queue = queue_of(grader)
    for text in ("<confidence>0.8</confidence>2", "12"):
        row = queue.submit(tokens(text), record(1)).result(240)
        assert JudgedRow.from_columns(row.columns(), "a test") == row
    queue.close()


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")
def test_graders_that_use_processes_work_from_the_queues_thread():
    """Mathematics in a pool of processes, and programs in the sandbox."""
    every_byte = TokenText([bytes([byte]) for byte in range(256)])
    grader = FaultTolerantGrader(build_grader("auto", {"math": {"workers": 1}, "code": {"workers": 1}}))
    queue = JudgingQueue(ResponseJudge(every_byte, ResponseParser(), grader, 16), "coca", require_evaluated=True)
    half = record(1, question="Halve 1.", answer="0.5")
    tests = {"kind": "asserts", "code": "assert f(1) == 1"}
    program = record(2, category="code", answer="", question="Return a.", metadata={"tests": tests})
    said = {
        "<confidence>0.8</confidence> \\boxed{\\frac{1}{2}}": half,
        "<confidence>0.8</confidence>\n```python\ndef f(a):\n    return a\n```": program,
        "<confidence>0.8</confidence>\n```python\ndef f(a):\n    return 2\n```": program,
    }
    results = [queue.submit(torch.tensor(list(text.encode())), asked) for text, asked in said.items()]
    rows = [result.result(240) for result in results]
    queue.close()
    assert [row.trained.outcome for row in rows] == [Outcome.RIGHT, Outcome.RIGHT, Outcome.WRONG], rows
