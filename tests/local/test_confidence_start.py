"""Before its training a model is shown its own success rates as confidences; a stop in between changes no byte."""

import json
import os
import re
import shutil
import signal
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from coca_mindspeed.algorithm.parsing import ResponseParser
from coca_mindspeed.cli import main
from coca_mindspeed.config.compose import compose_run
from coca_mindspeed.config.schema import ModelConfig
from coca_mindspeed.data.records import Record
from coca_mindspeed.errors import ConfigError, TrainingError
from coca_mindspeed.evaluation.metrics.calibration import calibration_metrics
from coca_mindspeed.evaluation.predictions import outcomes
from coca_mindspeed.grading.math.restated import EvaluatedOnly
from coca_mindspeed.grading.verdict import Outcome, Verdict
from coca_mindspeed.local import confidence_start, sft
from coca_mindspeed.local.confidence_start import (
    SampledQuestion,
    _draw,
    _example,
    _from_row,
    _print_summary,
    _row,
    _sampled_questions,
    _useful,
    expected_rates,
)
from coca_mindspeed.local.experience import GradedSamples
from coca_mindspeed.local.interrupt import InterruptedRunError
from coca_mindspeed.local.policy import Policy, load_policy
from coca_mindspeed.local.progress import SFTProgress, StepProgress
from coca_mindspeed.local.sampler import Samples
from coca_mindspeed.local.sft import SFTExample, sft_microbatch_tokens
from coca_mindspeed.scoring.responses import ScoredResponses
from coca_mindspeed.utils.tokenization import token_text
from tests.local.models_for_tests import write_random_model
from tests.local.runs_for_tests import small_session
from tests.tokenizers_for_tests import llama2_like, qwen_like, sentence_piece_like

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


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Policy:
    """A random Llama with byte-level BPE and a chat template."""
    directory = tmp_path_factory.mktemp("llama")
    write_random_model(directory, "llama")
    policy = load_policy(directory, ModelConfig(), CPU)
    return replace(policy, eos_ids=policy.eos_ids[:1])  # the others are letters, at which its random texts end


def graded(policy: Policy, rows: list[tuple[list[int], Outcome]], size: int) -> GradedSamples:
    """Of (token ids, what the grader says); a response ends where its last token is the policy's end."""
    lengths = torch.tensor([len(ids) for ids, _ in rows])
    token_ids = torch.tensor([ids + [0] * (int(lengths.max()) - len(ids)) for ids, _ in rows])
    texts = policy.text.decode(token_ids, lengths)
    parsed = [ResponseParser()(text) for text in texts]
    responses = ScoredResponses(
        texts=texts,
        parsed=parsed,
        verdicts=[Verdict(outcome) for _, outcome in rows],
        correct=torch.tensor([outcome is Outcome.RIGHT for _, outcome in rows]),
        confidence=torch.tensor([float("nan") if p.confidence is None else p.confidence for p in parsed]).double(),
        confidence_lengths=lengths,
        grading_seconds=0.0,
    )
    finished = torch.tensor([ids[-1] in policy.eos_ids for ids, _ in rows])
    empty = torch.zeros(len(rows), 1)
    samples = Samples([[0]] * (len(rows) // size), token_ids, lengths, empty, finished, empty[:, 0])
    return GradedSamples([record(i) for i in range(len(rows) // size)], samples, responses, size, {})


def test_the_success_rate_counts_every_response_and_only_whole_valid_ones_are_imitated(llama):
    right, wrong = Outcome.RIGHT, Outcome.WRONG

    def ids(text: str) -> list[int]:
        return llama.tokenizer(text, add_special_tokens=False)["input_ids"]

    (end,) = llama.eos_ids
    good, late = "<confidence> 0.9 </confidence> 1", "<confidence>0.20</confidence>2 <confidence> 0.3 </confidence>"
    split = [x for letter in good for x in ids(letter)]  # the same text by other tokens than the tokenizer's
    assert split != ids(good)
    rows = [
        ([*ids(good), end], right),
        ([*ids(late), end], wrong),
        ([*ids("1"), end], right),
        (ids(good), right),  # cut off
        ([*ids("<confidence> 1.5 </confidence> 7"), end], wrong),
        ([*split, end], right),
        ([*ids(good), end, *ids("2"), end], wrong),
        ([*ids(good), end], wrong),
        *[([*ids(good), end], right)] * 3,
        ([*ids(good), end], Outcome.UNGRADABLE),
        *[([*ids("3"), end], right)] * 4,
    ]
    found = _sampled_questions(graded(llama, rows, 4), llama)
    assert [each.record.id for each in found] == ["q0", "q1", "q2", "q3"]
    assert [each.success_rate for each in found] == [0.75, 0.25, 0.75, 1.0]
    assert found[0].responses == [(good, end), (late, end)]
    assert found[1].responses == [(good, end)]  # with a control token inside, its text would be another response
    assert [each.useful for each in found] == [True, True, False, False]


@pytest.mark.parametrize("kind", [llama2_like, sentence_piece_like, qwen_like])
@pytest.mark.parametrize("blank", ["", " "])
def test_a_tokenizers_own_blank_is_not_written_twice(kind, blank):
    """Llama 2's puts one before every text, and a response's text has it."""
    tokenizer = kind()
    end = tokenizer.eos_token_id
    policy = SimpleNamespace(tokenizer=tokenizer, text=token_text(tokenizer, len(tokenizer)), eos_ids=(end,))
    [ids] = tokenizer([blank + "<confidence> 0.9 </confidence> 12"], add_special_tokens=False)["input_ids"]
    (each,) = _sampled_questions(graded(policy, [([*ids, end], Outcome.RIGHT)] * 4, 4), policy)
    assert (len(each.responses), each.other_tokens) == (4, 0)
    text = each.responses[0][0]
    example = _example(policy, ResponseParser(), 5.0, record(0), text, end, 0.38)
    written = lambda tokens: b"".join(map(policy.text.bytes_of, tokens)).decode()  # noqa: E731
    assert written(example.response) == text.replace("0.9", "0.38")
    heavy = [token for token, weight in zip(example.response, example.weights, strict=True) if weight == 5.0]
    assert written(heavy).strip() == "<confidence> 0.38 </confidence>"


def test_responses_that_the_tokenizer_writes_with_other_tokens_are_named(llama):
    good = "<confidence> 0.9 </confidence> 1"
    split = [llama.tokenizer(letter, add_special_tokens=False)["input_ids"][0] for letter in good]
    found = _sampled_questions(graded(llama, [([*split, llama.eos_ids[0]], Outcome.RIGHT)] * 4, 4), llama)
    assert found == [_from_row(found[0].record, _row(found[0]))]
    with pytest.raises(
        TrainingError, match=r"only 0 of them .* 0 have no finished .* 1 only responses that do not round-trip"
    ):
        _useful(found)


@pytest.mark.parametrize(
    ("position", "before", "tagged", "behind"),
    [
        ("first", "", "<confidence> 0.9 </confidence>", " It is 12."),
        ("first", "", "\n <confidence>1</confidence>", "a</confidence>"),
        ("last", "It is 4. ", "<confidence> 0.123 </confidence>", ""),
        ("last", "<confidence> 0.9 </confidence> ö", "<confidence>0.99</confidence>", ""),
        ("last", "", "<confidence> 0.99 </confidence>", ""),
    ],
)
def test_a_response_is_restated_and_its_confidence_weighted(llama, position, before, tagged, behind):
    parser = ResponseParser(position)
    example = _example(llama, parser, 5.0, record(7), before + tagged + behind, 7, 0.375)
    assert example.record == record(7)
    assert example.response[-1] == 7
    restated = re.sub(r"[01][.0-9]*", "0.38", tagged)
    assert llama.tokenizer.decode(example.response[:-1]) == before + restated + behind
    heavy = [token for token, weight in zip(example.response, example.weights, strict=True) if weight == 5.0]
    assert llama.tokenizer.decode(heavy) == restated
    assert example.weights.count(1.0) == len(example.response) - len(heavy)
    assert _example(llama, parser, 1.0, record(7), before + tagged + behind, 7, 0.375).weights == [1.0] * len(
        example.response
    )


def test_every_question_and_every_lesson_of_it_is_drawn():
    taught = [[SFTExample(record(i), [i, end]) for end in (0, 1)] for i in range(9)]
    drawn = _draw(taught, 400, np.random.default_rng(0))
    assert {(example.record.id, *example.response) for example in drawn} == {
        (f"q{i}", i, end) for i in range(9) for end in (0, 1)
    }


def test_the_expected_rate_is_what_other_questions_say_and_not_what_was_sampled():
    """Rates that follow the states are found, noise is not; and a question's own rate does not enter its own."""
    random = np.random.default_rng(0)
    states = random.normal(size=(200, 12))
    knowledge = 1 / (1 + np.exp(-2 * states[:, 0]))
    rates = random.binomial(8, knowledge) / 8
    found = expected_rates(states, rates, 3)
    assert np.corrcoef(found, knowledge)[0, 1] > 0.93
    assert np.abs(found - knowledge).mean() < np.abs(rates - knowledge).mean() * 0.8
    assert found.min() >= 0
    assert found.max() <= 1
    noise = expected_rates(states, random.permutation(rates), 3)
    assert noise.std() < 0.1 * rates.std()
    one_more = rates.copy()
    one_more[17] = 1 - rates[17]
    others = expected_rates(states, one_more, 3)
    assert others[17] == found[17]
    assert (others != found).any()


def test_what_is_trained_is_the_started_model(never_stopped, tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(confidence_start, "respond_and_grade", lambda *a: calls.append(a))
    monkeypatch.setattr(confidence_start, "prompt_states", lambda *a: calls.append(a))
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
    assert calls == []
    parts = sorted((never_stopped / "confidence_start" / "responses").iterdir())
    assert [len(part.read_text().splitlines()) for part in parts] == [8, 8, 4]  # rollout.prompts=8
    rows = [json.loads(line) for part in parts for line in part.read_text().splitlines()]
    assert len({row["id"] for row in rows}) == 20
    assert {row["success_rate"] * 4 for row in rows} <= {0, 1, 2, 3, 4}
    rates = [json.loads(x) for x in (never_stopped / "confidence_start" / "rates.jsonl").read_text().splitlines()]
    assert [r["id"] for r in rates] == [row["id"] for row in rows if row["responses"] and not row["ungradable"]]
    assert all(0 <= r["expected"] <= 1 for r in rates)


def test_stopped_anywhere_it_goes_on_and_ends_with_the_same_bytes(never_stopped, tmp_path, monkeypatch):
    output = tmp_path / "run"
    show, advance = StepProgress.show, SFTProgress.advance

    def stop_asking(self, step, *parts):
        show(self, step, *parts)
        if step == 2 and self._title.startswith("asking"):
            os.kill(os.getpid(), signal.SIGTERM)

    def stop_learning(self, step, loss):
        advance(self, step, loss)
        if step == 3 and self._title == "start of the confidences":
            os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patched:
        patched.setattr(StepProgress, "show", stop_asking)
        with pytest.raises(InterruptedRunError, match="--resume"):
            session(output)
    assert len(list((output / "confidence_start" / "responses").iterdir())) == 2
    asked = []
    ask = confidence_start.respond_and_grade
    monkeypatch.setattr(confidence_start, "respond_and_grade", lambda *a: asked.append(len(a[1])) or ask(*a))
    with monkeypatch.context() as patched:
        patched.setattr(SFTProgress, "advance", stop_learning)
        with pytest.raises(InterruptedRunError, match=r"step 3 of the start of the confidences; saved .*step_000003"):
            session(output, resume=True)
    assert not (output / "confidence_start" / "model").exists()
    with closing(session(output, resume=True)) as opened:
        assert model(output) == model(never_stopped)
        opened.trainer.run()
    assert asked == [4]  # what was asked before was not asked again
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


def test_too_many_and_too_few_questions_are_refused_before_anything_is_written(tmp_path, capsys):
    with pytest.raises(ConfigError, match="expected 0 or at least 10"):
        session(tmp_path / "run", "confidence_start.questions=9")
    assert main(["demo", "--output", str(tmp_path / "demo"), "confidence_start.questions=20"]) == 1
    assert "confidence_start.questions=20: the demo" in capsys.readouterr().err
    with pytest.raises(ConfigError, match=r"confidence_start\.questions=71: .* 70 training questions; .* is 70"):
        session(tmp_path / "run", "confidence_start.questions=71")
    assert not (tmp_path / "run").exists() or not any((tmp_path / "run").iterdir())


def test_a_model_that_writes_no_confidence_is_refused(tmp_path):
    with pytest.raises(TrainingError, match=r"confidence_start\.questions=20: only \d .* 10 are needed: \d+ have no"):
        session(tmp_path / "run", "warm_up.steps=1")


def test_responses_without_room_for_what_is_taught_are_said_to_be(never_stopped, tmp_path, monkeypatch):
    output = tmp_path / "run"
    shutil.copytree(never_stopped, output)
    shutil.rmtree(output / "confidence_start" / "model")
    shutil.rmtree(output / "checkpoints")
    (output / "metrics.jsonl").unlink()
    monkeypatch.setattr(confidence_start, "_example", lambda *_: SFTExample(record(0), [1] * 99))
    with pytest.raises(TrainingError, match=r"rollout\.max_new_tokens=\d+"):
        session(output)


@pytest.mark.parametrize("rates", [[0.25, 0.25], [0.0, 0.5]])
def test_where_nothing_can_be_told_apart_it_is_said(rates, capsys):
    answered = [SampledQuestion(record(i), rate, False, [("text", 1)]) for i, rate in enumerate(rates)]
    config = compose_run("demo", []).run
    _print_summary([*answered, SampledQuestion(record(9), 1.0, True, [("text", 1)])], [0.25, 0.25], config)
    said = capsys.readouterr().err
    assert "3 questions, asked 8 times each: success rate 0.25 on average" in said
    assert "1 without a valid or with an ungradable response are left out" in said
    assert "warning: " in said
    _print_summary(answered, [0.1, 0.6], config)
    assert ("warning" in capsys.readouterr().err) == (rates[0] == rates[1])


def test_answers_that_leave_their_work_undone_are_labelled_as_the_training_rewards_them(tmp_path, monkeypatch):
    graders = []
    monkeypatch.setattr(confidence_start, "respond_and_grade", lambda *a: graders.append(a[2]) or 1 / 0)
    for required in ("true", "false"):
        with pytest.raises(ZeroDivisionError):
            session(tmp_path / required, f"data.require_evaluated={required}")
    assert [isinstance(grader, EvaluatedOnly) for grader in graders] == [True, False]


def test_a_supervised_pass_has_no_more_tokens_than_one_of_the_training():
    cases = {
        ("trainer.microbatch_tokens=700", "trainer.microbatch_prompts=null"): 700,
        ("trainer.microbatch_prompts=3",): 3 * (32 + 8 * 16),
        ("trainer.microbatch_prompts=null",): 32 * (32 + 8 * 16),  # 64 prompts in two minibatches
    }
    assert {case: sft_microbatch_tokens(compose_run("demo", case).run) for case in cases} == cases


@pytest.mark.slow
def test_a_method_with_the_confidence_last_starts_too(tmp_path):
    with closing(session(tmp_path / "run", "method=rlcr", "rollout.temperature=0.8")) as opened:
        opened.trainer.run()
    assert (tmp_path / "run" / "model" / "config.json").exists()


def test_the_disk_must_hold_the_started_model_too(tmp_path, monkeypatch):
    usage = type("Usage", (), {"free": 0})
    monkeypatch.setattr("coca_mindspeed.local.disk_space.shutil.disk_usage", lambda _: usage)
    with pytest.raises(ConfigError, match=" and 2 models"):
        session(tmp_path / "run")


def test_the_responses_are_made_likely_at_the_temperature_at_which_they_were_sampled(llama, monkeypatch):
    seen = []
    monkeypatch.setattr(sft, "sft_backward", lambda *a, **k: seen.append(k["temperature"]) or 0.0)
    for temperature in (0.7, 1.0):
        stage = sft.SFTStage(lambda random: [], "", 1, 1e-3, temperature=temperature)
        stage._accumulate_gradient(llama, [[5, 6]], [SFTExample(record(0), [7])])
    assert seen == [0.7, 1.0]


@pytest.mark.slow
def test_it_teaches_a_model_to_tell_its_questions_apart(tmp_path):
    """The tiny model knows sums of few digits and not those of many; the warm-up alone taught it to be sure of all."""
    sizes = ("data.train_size=2000", "data.evaluate_size=400", "warm_up.steps=200", "rollout.prompts=100")
    overrides = (*WARMED, *sizes, "rollout.group_size=8", "trainer.steps=1")
    found = {}
    for name, start in (
        ("without", ()),
        ("with", ("confidence_start.questions=400", "confidence_start.steps=80", "confidence_start.lr=0.002")),
    ):
        with closing(small_session(tmp_path / name, *overrides, *start)) as opened:
            data = outcomes(opened.trainer.evaluate(opened.trainer.evaluate_records, "after"))
        found[name] = calibration_metrics(data.confidence, data.correct, data.tokens_to_confidence).headline()
    print(found)
    assert found["with"]["auroc"] >= found["without"]["auroc"] + 0.15
    assert found["with"]["ece"] <= found["without"]["ece"] / 3
