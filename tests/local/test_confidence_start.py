"""Before its training a model is shown its own success rates as confidences; a stop in between changes no byte."""

import json
import os
import shutil
import signal
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch

from coca_mindspeed.algorithm.response import ResponseParser
from coca_mindspeed.config.schema import ModelConfig
from coca_mindspeed.data.records import Record
from coca_mindspeed.errors import ConfigError, TrainingError
from coca_mindspeed.evaluation.metrics.calibration import calibration_metrics
from coca_mindspeed.evaluation.predictions import outcomes
from coca_mindspeed.judging.responses import JudgedResponses
from coca_mindspeed.local import session as session_module
from coca_mindspeed.local.confidence_start import Answered, _answered, _Lessons, _tell
from coca_mindspeed.local.experience import JudgedSamples
from coca_mindspeed.local.interrupt import InterruptedRunError
from coca_mindspeed.local.policy import load_policy
from coca_mindspeed.local.progress import ImitationProgress, StepProgress
from coca_mindspeed.local.sampler import Samples
from tests.local.runs_for_tests import small_session

CPU = torch.device("cpu")
START = ("confidence_start.questions=20", "confidence_start.steps=6", "confidence_start.batch=8")
WARMED = ("warm_up.steps=60", "warm_up.batch=64", "trainer.steps=2", "checkpoint.interval=2", "evaluation.interval=0")


def session(output: Path, *overrides: str, resume: bool = False):
    return small_session(output, *WARMED, *START, *overrides, resume=resume)


def model(output: Path) -> bytes:
    return (output / "confidence_start" / "model" / "model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def never_stopped(tmp_path_factory) -> Path:
    """A run whose start was not interrupted, and which has been trained."""
    output = tmp_path_factory.mktemp("whole")
    with closing(session(output)) as opened:
        opened.trainer.run()
    return output


def record(number: int) -> Record:
    return Record(f"q{number}", "sums", "math", f"{number}+1=", str(number + 1))


def graded(rows: list[tuple[str, bool, bool]], size: int) -> JudgedSamples:
    """Of (text, right, finished) rows."""
    texts, correct, finished = zip(*rows, strict=True)
    count = len(rows)
    judged = JudgedResponses(
        texts=list(texts),
        parsed=[ResponseParser()(text) for text in texts],
        verdicts=[],
        correct=torch.tensor(correct),
        confidence=torch.zeros(count, dtype=torch.float64),
        confidence_lengths=torch.ones(count, dtype=torch.int64),
        grading_seconds=0.0,
    )
    empty, lengths = torch.zeros(count, 1), torch.ones(count, dtype=torch.int64)
    samples = Samples([[0]] * (count // size), empty.long(), lengths, empty, torch.tensor(finished), empty[:, 0])
    return JudgedSamples([record(i) for i in range(count // size)], samples, judged, size, {})


def stating(confidence: str, answer: str) -> str:
    return f"<confidence> {confidence} </confidence>{answer}"


def test_the_success_rate_counts_every_response_and_only_whole_valid_ones_are_imitated():
    first = [
        (stating("0.9", " 1"), True, True),
        ("<confidence>0.20</confidence>2", False, True),
        ("1", True, True),
        (stating("0.5", " 1"), True, False),  # cut off
    ]
    second = [
        (stating("0.9", ""), False, True),
        (stating("1.5", " 7"), False, True),
        (stating("0.1", " a\ufffd"), False, True),
        (stating("1.0", " 2 <confidence> 0.3 </confidence>"), True, True),
    ]
    found = _answered(graded([*first, *second, *[("3", True, True)] * 4], 4), ResponseParser())
    assert [each.record.id for each in found] == ["q0", "q1", "q2"]
    assert [each.success_rate for each in found] == [0.75, 0.25, 1.0]
    assert found[0].responses == [stating("0.75", " 1"), "<confidence>0.75</confidence>2"]
    assert found[1].responses == [stating("0.25", ""), stating("0.25", " 2 <confidence> 0.3 </confidence>")]
    assert found[2].responses == []


def test_a_lesson_is_a_question_with_one_of_the_responses_to_it():
    answered = [Answered(record(i), i / 8, [f"{i}a", f"{i}b"]) for i in range(9)]
    records, texts = _Lessons(answered, 400)(np.random.default_rng(0))
    assert {(question.id, text) for question, text in zip(records, texts, strict=True)} == {
        (f"q{i}", f"{i}{end}") for i in range(9) for end in "ab"
    }


def test_what_is_trained_is_the_started_model(never_stopped, tmp_path):
    started = load_policy(never_stopped / "confidence_start" / "model", ModelConfig(), CPU).model.state_dict()
    warm = load_policy(never_stopped / "warm_start", ModelConfig(), CPU).model.state_dict()
    assert any(not torch.equal(started[name], warm[name]) for name in warm)
    shutil.copytree(never_stopped, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    (tmp_path / "run" / "metrics.jsonl").unlink()
    with closing(session(tmp_path / "run")) as again:  # neither asked nor learned again
        trained = again.trainer.policy.model.state_dict()
        assert all(torch.equal(trained[name], started[name]) for name in started)
    assert not (never_stopped / "confidence_start" / "checkpoints").exists()
    parts = sorted((never_stopped / "confidence_start" / "responses").iterdir())
    assert [len(part.read_text().splitlines()) for part in parts] == [8, 8, 4]  # rollout.prompts=8
    rows = [json.loads(line) for part in parts for line in part.read_text().splitlines()]
    assert len({row["id"] for row in rows}) == 20
    assert {row["success_rate"] * 4 for row in rows} <= {0, 1, 2, 3, 4}


def test_stopped_anywhere_it_goes_on_and_ends_with_the_same_bytes(never_stopped, tmp_path, monkeypatch):
    output = tmp_path / "run"
    show, advance = StepProgress.show, ImitationProgress.advance

    def stop_asking(self, step, shown=""):
        show(self, step, shown)
        if step == 16 and self._title.startswith("asking"):
            os.kill(os.getpid(), signal.SIGTERM)

    def stop_learning(self, step, loss):
        advance(self, step, loss)
        if step == 3 and self._title == "start of the confidences":
            os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patched:
        patched.setattr(StepProgress, "show", stop_asking)
        with pytest.raises(InterruptedRunError, match=r"while the start of the confidences asked; --resume goes on"):
            session(output)
    assert len(list((output / "confidence_start" / "responses").iterdir())) == 2
    with monkeypatch.context() as patched:
        patched.setattr(ImitationProgress, "advance", stop_learning)
        with pytest.raises(InterruptedRunError, match=r"step 3 of the start of the confidences; saved .*step_000003"):
            session(output, resume=True)
    assert not (output / "confidence_start" / "model").exists()
    with closing(session(output, resume=True)) as opened:
        assert model(output) == model(never_stopped)
        opened.trainer.run()
    for name in ("metrics.jsonl", "model/model.safetensors"):
        assert (output / name).read_bytes() == (never_stopped / name).read_bytes()


def test_a_kill_before_the_checkpoints_are_removed_leaves_none_behind(never_stopped, tmp_path):
    shutil.copytree(never_stopped, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    (tmp_path / "run" / "metrics.jsonl").unlink()
    (tmp_path / "run" / "confidence_start" / "checkpoints" / "step_000006").mkdir(parents=True)
    (tmp_path / "run" / "confidence_start" / ".model.writing").mkdir()
    (tmp_path / "run" / "confidence_start" / "responses" / ".part_0001.jsonl.abcdefgh").write_text("half")
    with closing(session(tmp_path / "run")):
        pass
    left = {path.name for path in (tmp_path / "run" / "confidence_start").rglob("*") if path.is_file()}
    assert not any(name.startswith(".") for name in left)
    assert not (tmp_path / "run" / "confidence_start" / "checkpoints").exists()


def test_adapters_learn_the_rates_and_new_ones_are_put_into_what_they_made(tmp_path):
    """Stopped behind the first step: the base is the started model, and the end the same bytes."""
    pytest.importorskip("peft")
    lora = ("model.lora.rank=4", "checkpoint.interval=1", "checkpoint.keep=2")
    with closing(session(tmp_path / "run", *lora)) as opened:
        assert all("lora_" in n for n, p in opened.trainer.policy.model.named_parameters() if p.requires_grad)
        opened.trainer.run()
    warm = (tmp_path / "run" / "warm_start" / "model.safetensors").read_bytes()
    end = (tmp_path / "run" / "model" / "model.safetensors").read_bytes()
    assert model(tmp_path / "run") != warm  # merged
    shutil.rmtree(tmp_path / "run" / "model")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step_000002")
    with closing(session(tmp_path / "run", *lora, resume=True)) as resumed:
        assert resumed.resume_from.step == 1
        resumed.trainer.run(resumed.resume_from)
    assert (tmp_path / "run" / "model" / "model.safetensors").read_bytes() == end


def test_more_questions_than_there_are_are_refused_before_anything_is_written(tmp_path):
    with pytest.raises(ConfigError, match=r"confidence_start\.questions=71: .* data\.train has 70; .* works is 70"):
        session(tmp_path / "run", "confidence_start.questions=71")
    assert not (tmp_path / "run").exists() or not any((tmp_path / "run").iterdir())


def test_a_model_that_writes_no_confidence_is_refused(tmp_path):
    with pytest.raises(TrainingError, match=r"of 20 questions, asked 4 times each, no response states a confidence"):
        session(tmp_path / "run", "warm_up.steps=1")


def test_where_nothing_can_be_told_apart_it_is_said(never_stopped, capsys):
    with closing(session(never_stopped, resume=True)) as opened:
        config = opened.trainer.config
    _tell([Answered(record(i), 0.25, ["1"]) for i in range(3)] + [Answered(record(4), 1.0, [])], config, show=True)
    said = capsys.readouterr().err
    assert "4 questions, asked 4 times each: success rate 0.25 on average, deviation 0.00; 1 without a valid" in said
    assert "warning: all of them have a success rate of 0.25" in said


def test_the_disk_must_hold_the_started_model_too(tmp_path, monkeypatch):
    seen = []
    check = session_module.check_space
    monkeypatch.setattr(session_module, "check_space", lambda *a: (seen.append(a[-1]), check(*a)))
    with closing(session(tmp_path / "run")):
        pass
    assert seen == [2]


@pytest.mark.slow
def test_it_teaches_a_model_to_tell_its_questions_apart(tmp_path):
    """The tiny model knows sums of few digits and not those of many; the warm-up alone taught it to be sure of all."""
    sizes = ("data.train_size=2000", "data.evaluate_size=600", "warm_up.steps=300", "rollout.prompts=100")
    overrides = (*WARMED, *sizes, "rollout.group_size=8", "trainer.steps=1")
    found = {}
    for name, start in (
        ("without", ()),
        ("with", ("confidence_start.questions=600", "confidence_start.steps=200", "confidence_start.lr=0.001")),
    ):
        with closing(small_session(tmp_path / name, *overrides, *start)) as opened:
            data = outcomes(opened.trainer.evaluate(opened.trainer.evaluate_records, "after"))
        found[name] = calibration_metrics(data.confidence, data.correct, data.tokens_to_confidence).headline()
    print(found)
    assert found["with"]["auroc"] >= found["without"]["auroc"] + 0.15
    assert found["with"]["ece"] <= found["without"]["ece"] / 3
