"""The preflight: a run that could not learn is refused before its first step, and the run's randomness stays."""

import json

import pytest
import torch

from coca_mindspeed.algorithm.boundary import TokenText
from coca_mindspeed.algorithm.methods import method_settings
from coca_mindspeed.cli import main
from coca_mindspeed.config.compose import compose_run
from coca_mindspeed.data.records import Record
from coca_mindspeed.grading.factual import FactualGrader
from coca_mindspeed.local import run as session_module
from coca_mindspeed.local.evaluation import Preflight, preflight_tokens, run_preflight
from coca_mindspeed.local.sampler import Rollout, sample_responses
from coca_mindspeed.utils.console import duration
from tests.local.models_for_tests import write_random_model
from tests.local.runs_for_tests import QUESTIONS, SMALL, arguments, result, rows, small_session, write_rows


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_random_model(tmp_path_factory.mktemp("models") / "model", "qwen2")


def test_a_model_that_states_no_confidence_is_refused_before_the_first_step(tmp_path, model, capsys):
    assert main(arguments(tmp_path, model, "evaluation.preflight=9")) == 1
    message, run = capsys.readouterr().err, tmp_path / "run"
    assert "[no-format]" in message
    assert f"warm_up.records={tmp_path}/train.jsonl" in message
    assert len(rows(run / "samples" / "step_000000.jsonl")) == 9
    assert not (run / "metrics.jsonl").exists()
    warm_up = (f"warm_up.records={write_rows(tmp_path / 'warm_up.jsonl', QUESTIONS)}", "rollout.max_new_tokens=24")
    assert main(arguments(tmp_path, model, "evaluation.preflight=9", *warm_up, "warm_up.steps=1")) == 1
    assert "warm_up.steps=1: " in capsys.readouterr().err
    assert main(arguments(tmp_path, model)) == 0  # evaluation.preflight=0


def train(output, *more: str) -> int:
    keys = ("warm_up.steps=3", "evaluation.final_questions=0", "evaluation.interval=0")
    return main(["train", "demo", *SMALL, *keys, "--output", str(output), "--quiet", *more])


def test_the_run_is_the_same_with_and_without(tmp_path, monkeypatch):
    sampled = []
    original = session_module.run_preflight

    def counted(*each):
        sampled.append(original(*each))
        return sampled[-1]

    monkeypatch.setattr(session_module, "run_preflight", counted)
    monkeypatch.setattr(Preflight, "problems", lambda _: [])  # no response is valid yet
    assert train(tmp_path / "without") == 0
    assert not sampled
    assert train(tmp_path / "with", "evaluation.preflight=16", "trainer.steps=4") == 0
    assert train(tmp_path / "with", "evaluation.preflight=16", "--resume") == 0
    assert len(sampled) == 1  # not by the resumed run
    assert len(sampled[0].graded.records) == 16
    weights, metrics, samples = result(tmp_path / "with")
    assert len(samples.pop("step_000000.jsonl").splitlines()) == 16
    assert (weights, metrics, samples) == result(tmp_path / "without")


def preflight(texts: list[str], records: list[Record], *overrides: str) -> Preflight:
    ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(list(text.encode())) for text in texts], batch_first=True)
    lengths = torch.tensor([len(text.encode()) for text in texts])
    ended, zeros = torch.ones(len(texts), dtype=torch.bool), torch.zeros(ids.shape)
    rollout = Rollout(
        token_ids=ids, lengths=lengths, prompts=[[0]] * len(texts), log_probs=zeros, finished=ended, entropy=zeros[:, 0]
    )
    parsed = rollout.read(
        TokenText([bytes([byte]) for byte in range(256)]), method_settings("coca", max_confidence_tokens=16)
    )
    graded = parsed.graded(records, FactualGrader("exact"))
    return Preflight(compose_run("demo", list(overrides)).run, rollout, graded, seconds=1.0)


@pytest.mark.parametrize(
    ("overrides", "tokens"),
    [
        (("rollout.max_new_tokens=500",), 64),
        (("rollout.max_new_tokens=40",), 40),
        (("rollout.max_new_tokens=500", "method=rlcr"), 500),  # the confidence comes last
    ],
)
def test_a_confidence_that_comes_first_needs_few_tokens(overrides, tokens):
    assert preflight_tokens(compose_run("demo", list(overrides)).run) == tokens


class Refusing:
    def grade(self, records, answers):
        raise AssertionError("graded")

    def close(self) -> None: ...


@pytest.mark.parametrize(("longest", "cut_off"), [(64, False), (200, True)])
def test_what_a_short_sample_cannot_tell_is_said(tmp_path, longest, cut_off):
    session = small_session(tmp_path / "run", "evaluation.preflight=4")
    trainer = session.trainer
    rollout = trainer.config.rollout.model_copy(update={"max_new_tokens": longest})
    config = trainer.config.model_copy(update={"rollout": rollout})
    trainer.policy.eos_ids = (-1,)  # no response ends
    found = run_preflight(trainer.policy, trainer.records, Refusing() if cut_off else trainer.grader, config)
    session.close()
    assert found.rollout.lengths.tolist() == [64] * 4
    assert found.cut_off == 4 * cut_off
    rows = found.rows()
    assert all((row["correct"] is None) == cut_off for row in rows)
    assert ("unknown" in str(found), "are right" in str(found)) == (cut_off, not cut_off)
    responses = config.total_steps * config.rollout.prompts * config.rollout.group_size
    seconds = responses * longest * found.seconds / 256
    assert duration(seconds) in found.time
    assert f"{responses:,} responses" in found.time


def test_ended_responses_give_the_mean_length():
    found = preflight(["Madrid", "<confidence>0.5</confidence> Madrid"], [fact()] * 2)
    responses = found.config.total_steps * found.config.rollout.prompts * found.config.rollout.group_size
    assert duration(responses / 2) in found.time  # two responses a second


def test_progress_counts_the_tokens_of_each_batch(tmp_path):
    trainer = small_session(tmp_path / "run").trainer
    trainer.policy.eos_ids = (-1,)
    done = []
    sample_responses(
        trainer.policy,
        trainer.policy.encode_prompts(trainer.records[:3], None),
        group_size=1,
        max_new_tokens=5,
        temperature=1.0,
        generator=torch.Generator().manual_seed(0),
        batch_responses=2,
        progress=done.append,
    )
    assert done == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]


def fact(category: str = "factual") -> Record:
    return Record("a", "mine", category, "What is the capital of Spain?", "Madrid")


@pytest.mark.parametrize(
    ("stated", "count", "refused"), [(2, 4, False), (1, 4, True), (8, 16, False), (7, 16, True), (1, 1, False)]
)
def test_half_of_the_responses_must_state_a_confidence(stated, count, refused):
    texts = ["<confidence>0.5</confidence> Madrid"] * stated + ["Madrid"] * (count - stated)
    problems = preflight(texts, [fact()] * count).problems()
    assert [problem.code for problem in problems] == ["no-format"] * refused


@pytest.mark.parametrize(
    ("named", "category", "overrides", "advice"),
    [
        (3, "factual", ("data.grader=auto",), "data.grader_options.factual.match=contains"),
        (3, "factual", ("data.grader=factual",), "data.grader_options.match=contains"),
        (3, "math", ("data.grader=auto",), '"category": "factual"'),
        (3, "math", ("data.grader=exact",), None),
        (1, "factual", ("data.grader=auto",), "match=contains"),
        (0, "factual", ("data.grader=auto",), None),
    ],
)
def test_answers_that_name_the_gold_answer_and_are_wrong(named, category, overrides, advice):
    texts = ["It may be Madrid, a large city."] * named + ["Madrid"] * (2 - named) + ["Paris"] * 2
    shown = str(preflight(texts, [fact(category)] * len(texts), *overrides))
    assert ("warning" in shown) == (advice is not None)
    if advice is not None:
        assert f"{named} of {len(texts)}" in shown
        assert advice in shown
    assert json.dumps(shown).count("question: ") == 2
