"""A model that never writes the tags learns them before it is trained; a stop in between changes no byte."""

import math
import os
import re
import shutil
import signal
from contextlib import closing
from pathlib import Path

import pytest
import torch
from transformers import GenerationConfig

from coca_mindspeed.algorithm.methods import method_settings
from coca_mindspeed.algorithm.parsing import ResponseFormat
from coca_mindspeed.config.compose import compose_run
from coca_mindspeed.config.schema import ModelConfig, WarmUpConfig
from coca_mindspeed.data.records import Record, write_records
from coca_mindspeed.errors import ConfigError, TrainingError
from coca_mindspeed.local import sft
from coca_mindspeed.local.inputs import warm_up_format
from coca_mindspeed.local.load import load_policy
from coca_mindspeed.local.run_directory import list_checkpoints
from coca_mindspeed.local.sft import encode_responses, sft_backward
from coca_mindspeed.utils.process import InterruptedRunError
from coca_mindspeed.utils.progress import StepProgress
from tests.local.models_for_tests import write_random_model
from tests.local.runs_for_tests import open_session

CPU = torch.device("cpu")


def records(kind: str, first: int, number: int) -> list[Record]:
    return [
        Record(f"{kind}-{i}", kind, "math", f"What is {i} + {i}?", str(2 * i), metadata={"instruction": ""})
        for i in range(first, first + number)
    ]


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A random Llama with a real chat template, and three sets of questions."""
    directory = tmp_path_factory.mktemp("place")
    write_random_model(directory / "model", "llama")
    end = load_policy(directory / "model", ModelConfig(), CPU).tokenizer.eos_token_id
    GenerationConfig(eos_token_id=end, pad_token_id=end).save_pretrained(directory / "model")
    write_records(directory / "warm_up.jsonl", records("example", 0, 40))
    write_records(directory / "train.jsonl", records("train", 40, 30))
    write_records(directory / "evaluate.jsonl", records("held_out", 70, 16))
    return directory


def session(place: Path, output: Path, *overrides: str, resume: bool = False, show: bool = False):
    settings = (
        *(f"model.path={place}/model", f"data.train={place}/train.jsonl", f"data.evaluate={place}/evaluate.jsonl"),
        *(f"warm_up.records={place}/warm_up.jsonl", "warm_up.steps=6", "warm_up.batch=8", "warm_up.lr=0.004"),
        *("data.grader=exact", "model.compute_dtype=float32", "rollout.prompts=2", "rollout.group_size=2"),
        *("rollout.max_new_tokens=32", "trainer.steps=1", "trainer.minibatches=1", "trainer.device=cpu"),
        *("trainer.threads=1", "evaluation.interval=0", "logging.tensorboard=false", "checkpoint.interval=2"),
    )
    return open_session(compose_run("local", [*settings, *overrides]), output, resume=resume, show_progress=show)


def weights(output: Path) -> bytes:
    return (output / "warm_start" / "model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def never_stopped(place, tmp_path_factory) -> Path:
    output = tmp_path_factory.mktemp("whole")
    with closing(session(place, output)):
        pass
    return output


def confidences(trainer) -> list[float]:
    predictions = trainer.held_out.evaluate(trainer.held_out.records, "after")
    return [p.confidence for p in predictions if p.confidence is not None]


@pytest.mark.nightly
def test_a_model_that_never_writes_the_tags_writes_them_and_can_be_trained(place, tmp_path):
    with closing(session(place, tmp_path / "without", "warm_up.records=null")) as untaught:
        assert not confidences(untaught.trainer)
    with closing(session(place, tmp_path / "with", "warm_up.steps=160", "warm_up.batch=16")) as taught:
        stated = confidences(taught.trainer)
        assert len(stated) >= 8  # of 16, by 30,000 random parameters
        assert sum(confidence > 0.85 for confidence in stated) > len(stated) / 2  # sure of everything, as it was shown
        taught.trainer.run()
    assert (tmp_path / "with" / "model" / "config.json").exists()


def stop_at(monkeypatch, at, error=None):
    """Let a warm-up be stopped by SIGTERM, or fail with ``error``, after so many steps."""
    show = StepProgress.show

    def shown(self, step, *loss):
        show(self, step, *loss)
        if step == at and self._title == "warm-up ":
            if error is not None:
                raise error
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(StepProgress, "show", shown)


def test_a_stopped_warm_up_goes_on_and_ends_with_the_same_bytes(place, never_stopped, tmp_path, monkeypatch):
    """By a signal in the middle and at the last step, which must not lose the request, and by a crash."""
    run, seen = tmp_path / "run", []
    for at in (3, 6):
        with pytest.MonkeyPatch.context() as patched:
            stop_at(patched, at)
            with pytest.raises(InterruptedRunError, match=rf"step {at} .*step_00000{at}"):
                session(place, run, resume=at > 3)
        assert not (run / "warm_start").exists()
    with closing(session(place, run, resume=True)):
        assert weights(run) == weights(never_stopped)
    with pytest.MonkeyPatch.context() as patched:
        stop_at(patched, 5, KeyError())
        with pytest.raises(KeyError):
            session(place, tmp_path / "crashed")
    monkeypatch.setattr(StepProgress, "show", lambda self, step, *loss: seen.append(step) if loss else None)
    with closing(session(place, tmp_path / "crashed")):
        assert seen == [5, 6]  # checkpoint.interval=2
        assert weights(tmp_path / "crashed") == weights(never_stopped)
    assert not (run / "warm_up").exists()  # its checkpoints are of no more use


def test_adapters_learn_the_format_and_new_ones_are_put_into_what_they_made(place, tmp_path):
    """Stopped in the warm-up, behind it, and behind the first step: the same bytes as in one go."""
    pytest.importorskip("peft")
    lora = ("model.lora.rank=4", "trainer.steps=2", "checkpoint.interval=1")
    with closing(session(place, tmp_path / "whole", *lora)) as whole:
        assert all("lora_" in n for n, p in whole.trainer.policy.model.named_parameters() if p.requires_grad)
        whole.trainer.run()
    start, end = weights(tmp_path / "whole"), (tmp_path / "whole" / "model" / "model.safetensors").read_bytes()
    assert start != (place / "model" / "model.safetensors").read_bytes()  # merged
    output = tmp_path / "run"
    with pytest.MonkeyPatch.context() as patched:
        stop_at(patched, 3)
        with pytest.raises(InterruptedRunError):
            session(place, output, *lora)
    assert not (output / "warm_up" / "step_000003" / "model").exists()
    session(place, output, *lora).close()
    assert weights(output) == start
    (output / "warm_up" / "step_000006").mkdir(parents=True)  # as a kill before the removal leaves it
    with closing(session(place, output, *lora)) as again:
        assert not (output / "warm_up").exists()
        assert again.trainer.policy.adapters is not None
        again.trainer.run()
    assert (output / "model" / "model.safetensors").read_bytes() == end
    for path in (output / "model", list_checkpoints(output / "checkpoints")[-1].path):
        shutil.rmtree(path)
    with closing(session(place, output, *lora, resume=True)) as resumed:
        assert resumed.resume_from.step == 1
        resumed.trainer.run(resumed.resume_from)
    assert (output / "model" / "model.safetensors").read_bytes() == end


def test_other_lessons_under_the_same_path_are_refused_once_steps_were_taken(place, tmp_path):
    examples = tmp_path / "examples.jsonl"
    write_records(examples, records("example", 0, 20))
    override = f"warm_up.records={examples}"
    with closing(session(place, tmp_path / "run", override)) as first:
        first.trainer.run()
    write_records(examples, records("example", 1, 20))
    with pytest.raises(ConfigError, match=r"data\.warm_up"):
        session(place, tmp_path / "run", override, resume=True)


def test_the_loss_is_that_of_the_response_tokens_alone(place):
    """Against logits taken one sequence at a time; the end of the response counts, the prompt and padding do not."""
    policy = load_policy(place / "model", ModelConfig(), CPU)
    chosen = records("example", 7, 3)
    texts = [ResponseFormat("first", spaced=True).response("9" * (i + 1), 0.5) for i in range(3)]
    prompts = policy.encode_prompts(chosen, "Say it.")
    responses = encode_responses(policy, texts)
    assert all(response[-1] == policy.tokenizer.eos_token_id for response in responses)
    losses = []
    for prompt, response in zip(prompts, responses, strict=True):
        logits = policy.model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
        losses.append(torch.nn.functional.cross_entropy(logits, torch.tensor(response), reduction="none"))
    found = sft_backward(policy, prompts, responses)
    assert found == pytest.approx(float(torch.cat(losses).mean().detach()), rel=1e-4)


@pytest.mark.parametrize(("end", "opening"), [("", "<think>\n"), ("<think>\n", "")])
def test_with_thinking_a_warm_up_teaches_the_beginning_alone(place, monkeypatch, end, opening):
    policy = load_policy(place / "model", ModelConfig(), CPU)
    policy.tokenizer.chat_template += end
    lessons = []
    monkeypatch.setattr(
        sft, "accumulate_gradient", lambda _, prompts, responses, *more: lessons.extend(responses) or 0.0
    )
    method = method_settings(thinking=True)
    sft.warm_up(
        policy, records("example", 7, 3), method, WarmUpConfig(steps=1), 0, response_format=warm_up_format(method)
    )
    written = [policy.tokenizer.decode(ids) for ids in lessons]
    pattern = re.escape(opening) + r"<confidence> [01]\.\d\d </confidence>"
    assert written
    assert all(re.fullmatch(pattern, text) for text in written)


@pytest.mark.parametrize("question_weight", [0.0, 0.5])
def test_the_gradient_does_not_depend_on_how_an_update_is_cut(place, question_weight, monkeypatch):
    """Responses of several lengths, so that a mean of the parts' means would be another number."""
    policy = load_policy(place / "model", ModelConfig(), CPU)
    chosen = records("example", 7, 7)
    prompts = policy.encode_prompts(chosen, "Say it.")
    responses = encode_responses(policy, ["9" * (1 + 3 * i) for i in range(7)])
    seen, found = [], []
    monkeypatch.setattr(sft, "sft_backward", lambda *a, **k: seen.append(len(a[1])) or sft_backward(*a, **k))
    for tokens in (None, 10**6, len(prompts[0]) + 30):
        loss = sft.accumulate_gradient(policy, prompts, responses, question_weight, tokens)
        found.append((loss, torch.cat([p.grad.flatten() for p in policy.trained_parameters()])))
        policy.model.zero_grad()
    assert seen[:2] == [7, 7]
    assert len(seen) > 4
    assert found[0][0] == sft_backward(policy, prompts, responses, question_weight)
    for loss, gradient in found[1:]:
        assert loss == pytest.approx(found[0][0], rel=1e-5)
        assert float((gradient - found[0][1]).norm() / found[0][1].norm()) < 1e-5


def test_what_all_prompts_start_with_counts_once(place, monkeypatch):
    """As it runs once in a pass; where questions are learned too, every prompt runs by itself."""
    policy = load_policy(place / "model", ModelConfig(), CPU)
    prompts = [[5] * 40 + [6 + i] for i in range(6)]
    responses = [[20, 21, 22]] * 6
    seen = []
    monkeypatch.setattr(sft, "sft_backward", lambda *a, **k: seen.append(len(a[1])) or sft_backward(*a, **k))
    for question_weight, tokens, expected in (
        (0.0, 40 + 6 * 4, [6]),
        (0.0, 40 + 6 * 4 - 1, [5, 1]),
        (0.0, 10, [1] * 6),
        (0.5, 6 * 44, [6]),
        (0.5, 6 * 44 - 1, [5, 1]),
    ):
        sft.accumulate_gradient(policy, prompts, responses, question_weight, tokens)
        assert seen == expected
        seen.clear()


@pytest.mark.parametrize("what", ["loss", "gradient"])
def test_a_warm_up_that_diverges_is_not_exported(place, tmp_path, monkeypatch, what):
    def diverging(policy, *args, **kwargs):
        loss = sft_backward(policy, *args, **kwargs)
        if not list_checkpoints(tmp_path / "run" / "warm_up"):
            return loss
        if what == "gradient":
            policy.trained_parameters()[0].grad[0] = math.nan
        return math.nan if what == "loss" else loss

    monkeypatch.setattr(sft, "sft_backward", diverging)
    with pytest.raises(TrainingError, match=r"update 3 of 6: .*warm_up\.lr=0\.004"):
        session(place, tmp_path / "run")
    assert not (tmp_path / "run" / "warm_start").exists()
    assert list_checkpoints(tmp_path / "run" / "warm_up")


def test_the_turn_ends_as_the_tokenizer_says(place):
    """Llama 3 lists two ends; what its conversations end with is not the first."""
    policy = load_policy(place / "model", ModelConfig(), torch.device("cpu"))
    own = policy.tokenizer.eos_token_id
    for listed in ((own,), (own + 1, own)):
        policy.eos_ids = listed
        assert encode_responses(policy, ["7"])[0][-1] == own
    policy.eos_ids = (own + 1, own + 2)
    assert encode_responses(policy, ["7"])[0][-1] == own + 1
