"""Responses that arrive one by one are scored together, and each for itself."""

import asyncio
import threading

import pytest
import torch

from coca_mindspeed.algorithm.boundary import TokenText
from coca_mindspeed.algorithm.methods import method_settings
from coca_mindspeed.grading.custom import FaultTolerantGrader
from coca_mindspeed.grading.registry import build_grader
from coca_mindspeed.grading.verdict import ExactGrader, Outcome, Verdict
from coca_mindspeed.local.tiny_model import tiny_tokenizer
from coca_mindspeed.scoring.responses import ResponseScorer
from coca_mindspeed.utils import gathering
from coca_mindspeed.utils.tokenization import token_text
from coca_mindspeed.verl.reward_queue import ScoringQueue
from tests.grading.sandbox_package import needs_sandbox
from tests.verl.configurations import record

TOKENIZER = tiny_tokenizer("$")
RIGHT = "<confidence>0.8</confidence>2"


def tokens(text):
    return torch.tensor(TOKENIZER(text, add_special_tokens=False)["input_ids"])


class Fake:
    """Grades by ``verdict`` (exactly by default) and keeps how many answers came at once; waits for ``go``."""

    def __init__(self, verdict=None):
        self.batches: list[int] = []
        self.started, self.go = threading.Event(), threading.Event()
        self.go.set()
        self._verdict = verdict

    def grade(self, records, answers):
        self.batches.append(len(records))
        self.started.set()
        assert self.go.wait(240)
        if self._verdict is None:
            return ExactGrader().grade(records, answers)
        return [self._verdict(each) for each in records]

    def close(self):
        pass


def queue_of(grader, *, require_evaluated=False, text=None):
    text = text or token_text(TOKENIZER, len(TOKENIZER))
    return ScoringQueue(ResponseScorer(method_settings(), text, grader, require_evaluated), "coca")


def scored(queue, *asked):
    async def all_together():
        return await asyncio.wait_for(asyncio.gather(*(queue.score(ids, question) for ids, question in asked)), 240)

    reports = asyncio.run(all_together())
    queue.close()
    return reports


def test_each_response_is_scored_by_its_own_tokens():
    said = [RIGHT, "<confidence>.3</confidence>5", "12", "<confidence>1.5</confidence>4"]
    reports = scored(queue_of(Fake()), *((tokens(text), record(i)) for i, text in enumerate(said, start=1)))
    assert [report["reward_score"] for report in reports] == [1.0, 0.0, 0.0, 0.0]
    infos = [report["reward_extra_info"] for report in reports]
    assert [info["prediction"]["confidence"] for info in infos] == [0.8, 0.3, None, None]
    assert [info["confidence_length"] for info in infos] == [[5], [4], [2], [6]]
    assert [info["segment_ends"] for info in infos] == [[5, 6], [4, 5], [2, 2], [6, 6]]
    assert [info["prediction"]["tokens"] for info in infos] == [6, 5, 2, 6]
    assert (infos[0]["verdict"], infos[0]["acc"]) == ("right", 1.0)
    named = {name: infos[0]["prediction"][name] for name in ("response", "gold", "method")}
    assert named == {"response": said[0], "gold": "2", "method": "coca"}


@pytest.mark.parametrize("cancelled", [False, True])
def test_responses_that_arrive_while_others_are_graded_are_graded_together(cancelled):
    """A failed session of verl's cancels its request; the others are not affected."""
    grader = Fake()
    grader.go.clear()
    queue = queue_of(grader)

    async def arrive():
        ask = (tokens(RIGHT), record(1))
        requests = [asyncio.create_task(queue.score(*ask))]
        await asyncio.to_thread(grader.started.wait, 240)
        requests += [asyncio.create_task(queue.score(*ask)) for _ in range(20)]
        await asyncio.sleep(0)
        if cancelled:
            requests[1].cancel()
        await asyncio.sleep(0)
        grader.go.set()
        return await asyncio.gather(*requests, return_exceptions=True)

    reports = asyncio.run(arrive())
    queue.close()
    assert grader.batches == [1, 20 - cancelled]
    assert isinstance(reports[1], asyncio.CancelledError) == cancelled
    assert all(report["reward_score"] == 1.0 for report in [reports[0], *reports[2:]])


def test_the_queue_waits_a_moment_for_further_responses(monkeypatch):
    monkeypatch.setattr(gathering, "GATHERING_SECONDS", 0.5)
    grader = Fake()
    queue = queue_of(grader)

    async def later():
        first = asyncio.create_task(queue.score(tokens(RIGHT), record(1)))
        for _ in range(2):  # the request is made, and the queue begins to wait
            await asyncio.sleep(0)
        await asyncio.gather(first, queue.score(tokens(RIGHT), record(1)))

    asyncio.run(later())
    queue.close()
    assert grader.batches == [2]


def test_a_grader_that_fails_at_one_answer_makes_it_ungradable():
    def verdict(asked):
        if asked.id == "q3":
            raise ValueError("three")
        return Verdict(Outcome.RIGHT)

    reports = scored(queue_of(FaultTolerantGrader(Fake(verdict))), *((tokens(RIGHT), record(i)) for i in range(6)))
    infos = [report["reward_extra_info"] for report in reports]
    assert [info["verdict"] for info in infos] == ["right"] * 3 + ["ungradable"] + ["right"] * 2
    assert "ValueError: three" in infos[3]["reason"]
    assert (infos[3]["prediction"]["correct"], infos[3]["acc"]) == (None, 0.0)


@pytest.mark.parametrize(("required", "reward"), [(True, 0.0), (False, 1.0)])
def test_training_may_be_stricter_than_an_evaluation(required, reward):
    restated = record(1, question="Compute 1+1=", metadata={"grader": "math"})
    queue = queue_of(Fake(lambda _: Verdict(Outcome.RIGHT)), require_evaluated=required)
    (report,) = scored(queue, (tokens("<confidence>0.8</confidence>$1+1$"), restated))
    assert report["reward_extra_info"]["prediction"]["correct"]
    assert report["reward_score"] == reward


def test_a_batch_that_fails_does_not_end_the_queue():
    queue = queue_of(Fake())

    async def both():
        with pytest.raises((IndexError, ValueError)):
            await queue.score(torch.tensor([10_000]), record(1))
        return await queue.score(tokens(RIGHT), record(1))

    assert asyncio.run(both())["reward_score"] == 1.0
    queue.close()


@needs_sandbox
def test_graders_that_use_processes_work_from_the_queues_thread():
    """Mathematics in a pool of processes, and programs in the sandbox."""
    grader = FaultTolerantGrader(build_grader("auto", {"math": {"workers": 1}, "code": {"workers": 1}}))
    half = record(1, question="Halve 1.", answer="0.5")
    tests = {"kind": "asserts", "code": "assert f(1) == 1"}
    program = record(2, category="code", answer="", question="Return a.", metadata={"tests": tests})
    said = {
        "<confidence>0.8</confidence> \\boxed{\\frac{1}{2}}": half,
        "<confidence>0.8</confidence>\n```python\ndef f(a):\n    return a\n```": program,
        "<confidence>0.8</confidence>\n```python\ndef f(a):\n    return 2\n```": program,
    }
    queue = queue_of(grader, require_evaluated=True, text=TokenText([bytes([byte]) for byte in range(256)]))
    reports = scored(queue, *((torch.tensor(list(text.encode())), asked) for text, asked in said.items()))
    assert [report["reward_extra_info"]["verdict"] for report in reports] == ["right", "right", "wrong"], reports
