"""Whole loops of the real verl on a CPU: ``python -m verl.trainer.main_ppo`` with the plugin and nothing patched.

What it proves: rewards, groups, advantages, aggregations, stages, validation, dumps and resuming, through Ray,
TransferQueue, the reward loop and FSDP2.  What it does not: anything about a rollout engine or an accelerator.
A start takes a minute or two, so each run is asked several questions.
"""

import json

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

from coca_mindspeed import cli
from coca_mindspeed.algorithm.methods import method_settings, training_method
from coca_mindspeed.config.prompt_form import prompt_file, read_prompt_file
from coca_mindspeed.evaluation.predictions import read_predictions
from coca_mindspeed.utils.saving import StopRequest
from tests.integration import custom_code
from tests.integration.verl import loop, tiny
from tests.integration.verl.following import credit, gradient_norms
from tests.support.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
MEDDLING = "tests.integration.verl.meddling"
# Valid responses, in groups with right and wrong answers and in groups without a right one, on every machine.
BY_TURNS = {"modules": MEDDLING, "COCA_TEST_TURNS": "1"}
MINIBATCH = "actor_rollout_ref__actor__ppo_mini_batch_size"
STEPS = "trainer__total_training_steps"


def finished(config, **environment):
    code = loop.start(config, **environment).wait()
    assert code == 0, loop.log_of(config.parent)[-6000:]


def kept(run, step=1):
    return torch.load(run / "batches" / f"{step}.pt", weights_only=False)


def keeping(run):
    (run / "batches").mkdir(parents=True, exist_ok=True)
    return {"modules": MEDDLING, "COCA_TEST_BATCHES": str(run / "batches")}


def assert_same_gradient(warm, run, method, *, ranks, minibatches):
    norms, difference = gradient_norms(warm / "model", kept(run), method, ranks=ranks, minibatches=minibatches, group=8)
    assert difference < 1e-6
    theirs = loop.metrics(run)[1]["actor/grad_norm"]
    assert sum(norms) / len(norms) == pytest.approx(theirs, rel=1e-4)


@pytest.fixture(scope="module")
def resumed(warm, tmp_path_factory):
    """Four steps of two updates each; killed with everything it had started in the third, and resumed."""
    run = tmp_path_factory.mktemp("resumed")
    keys = {MINIBATCH: 8, STEPS: 4, "trainer__save_freq": 1, "trainer__test_freq": 2}
    config = tiny.configuration(warm, run, **keys)
    killed = loop.start(config, **keeping(run))
    tracker = run / "checkpoints" / "latest_checkpointed_iteration.txt"
    until(lambda: not killed.running or (tracker.is_file() and tracker.read_text() == "2"), 1500)
    assert killed.running, loop.log_of(run)[-6000:]
    killed.kill()
    finished(config, **keeping(run))
    return run


def test_two_updates_a_step_are_those_of_the_local_engine(warm, resumed):
    assert_same_gradient(warm, resumed, method_settings(), ranks=1, minibatches=2)
    first = loop.metrics(resumed)[1]
    assert first["confidence/clip_fraction"] + first["answer/clip_fraction"] > 0
    assert {"reward/confidence", "reward/answer", "rollout/gesr", "rollout/ece", "rollout/brier"} <= first.keys()


def test_a_killed_run_goes_on_to_its_end_and_asks_nothing_twice(resumed):
    # verl writes a checkpoint before it logs and dumps its step, so both of step 2 may be lost.
    logged = [json.loads(line)["step"] for line in (resumed / "metrics.jsonl").read_text().splitlines()]
    assert logged in ([1, 2, 3, 4], [1, 3, 4])
    assert not list(resumed.glob(".metrics*"))
    asked = [{row["prediction"]["id"] for row in kept(resumed, step)} for step in (1, 2, 3, 4)]
    assert all(len(ids) == 16 for ids in asked)
    assert len(set().union(*asked)) == 64
    assert (resumed / "checkpoints" / "latest_checkpointed_iteration.txt").read_text() == "4"


def test_a_run_that_is_asked_to_stop_saves_its_step_and_goes_on(warm, tmp_path):
    """The interval would save none; verl's loop ends as ever, and so does its process."""
    run = tmp_path / "run"
    config, request = tiny.configuration(warm, run, **{STEPS: 12, "trainer__save_freq": 100}), StopRequest.of(run)
    stopped, log = loop.start(config), run / "metrics.jsonl"
    until(lambda: not stopped.running or (log.is_file() and log.read_bytes().count(b"\n") >= 2), 1500)
    request.ask()
    assert stopped.wait() == 0, loop.log_of(run)[-6000:]
    step, tracker = request.answered(), run / "checkpoints" / "latest_checkpointed_iteration.txt"
    assert step is not None
    assert 2 <= step < 12
    assert tracker.read_text() == str(step)
    assert max(loop.metrics(run)) == step
    request.withdraw()
    finished(config)
    assert [json.loads(line)["step"] for line in log.read_text().splitlines()] == list(range(1, 13))
    assert all(row["rollout/log_prob_gap"] < 1e-3 for row in loop.metrics(run).values())


def test_a_validation_is_ours_and_its_predictions_are_evaluated(resumed, tmp_path):
    last = loop.metrics(resumed)[4]
    assert {"eval/accuracy", "eval/ece", "eval/brier", "eval/success_rate", "eval/tokens_to_confidence"} <= last.keys()
    assert last["eval/missing"] == 0
    assert last["val-core/arithmetic/acc/mean@1"] == pytest.approx(last["eval/accuracy"])
    predictions = resumed / "validation" / "predictions_step_000004.jsonl"
    assert cli.main(["evaluate", str(predictions), "--output", str(tmp_path / "out")]) == 0
    assert len(predictions.read_text().splitlines()) == 24


def test_the_dump_says_what_each_response_stated_earned_and_learned(resumed):
    rows = loop.rollouts(resumed, 3)
    assert len(rows) == 128
    assert {"confidence", "verdict", "gesr", "confidence_advantage", "answer_advantage", "response"} <= rows[0].keys()
    for start in range(0, 128, 8):
        group = rows[start : start + 8]
        assert len({row["id"] for row in group}) == 1
        assert group[0]["gesr"] == pytest.approx(sum(row["verdict"] == "right" for row in group) / 8)


@pytest.mark.parametrize("thinking", [False, True])
def test_two_ranks_with_segment_means_the_scale_of_the_batch_and_an_entropy_bonus(thinking, request, tmp_path):
    warm = request.getfixturevalue("warm_thinking" if thinking else "warm")
    keys = {"loss_aggregation": "segment_mean", "advantage_scale": "batch", "entropy_bonus": 0.05, "thinking": thinking}
    method = method_settings(**keys)
    changes = {MINIBATCH: 8, STEPS: 1, "coca__method": keys}
    if thinking:
        changes |= {"data__max_response_length": 40, "trainer__test_freq": 1}
    finished(tiny.configuration(warm, tmp_path / "run", gpus=2, **changes), **keeping(tmp_path / "run"))
    assert_same_gradient(warm, tmp_path / "run", method, ranks=2, minibatches=2)
    first, rows = loop.metrics(tmp_path / "run")[1], kept(tmp_path / "run")
    sampled = [row["old_log_probs"][: row["segment_ends"][0]] for row in rows]
    assert first["confidence/entropy"] == pytest.approx(-float(torch.cat(sampled).mean()), rel=1e-4)
    assert (first.get("response/open_thought_share", 1) < 0.5) == thinking
    if thinking:
        prompt = read_prompt_file(prompt_file(tmp_path / "run" / "checkpoints"))
        answers = read_predictions(tmp_path / "run" / "validation" / "predictions_step_000001.jsonl")
        assert {answer.form for answer in answers} == {*prompt.form.digests().values()}
        assert prompt.form.thinking


def test_a_failing_grader_and_a_failing_session_with_token_means(warm, tmp_path):
    """An answer that cannot be graded is counted; a group that lacks a response teaches nothing, and is counted."""
    changes = {STEPS: 1, MINIBATCH: 8}
    changes |= {"coca__method": {"loss_aggregation": "token_mean"}, "coca__broken_groups": 1}
    run = tmp_path / "run"
    # Five of the 16 answers end with 1, so some are graded whichever group loses a response.
    failing = {"COCA_TEST_GRADER_FAILS": "1", "COCA_TEST_SESSION_FAILS": "37"}
    finished(tiny.configuration(warm, run, **changes), **keeping(run), **failing)
    first = loop.metrics(run)[1]
    assert first["group/broken"] == 1
    dump = loop.rollouts(run, 1)
    assert len(dump) == 15 * 8
    failed = [row for row in dump if row["verdict"] == "ungradable"]
    assert {row["gold"][-1] for row in failed} == {"1"}
    assert all(row["reason"] == "the grader failed: ValueError: a grader of the test's" for row in failed)
    assert first["grading/ungradable_share"] == pytest.approx(len(failed) / len(dump))
    assert sum(row["key"].startswith("pad") for row in kept(run)) == 1
    assert_same_gradient(warm, run, method_settings(loss_aggregation="token_mean"), ranks=1, minibatches=2)


def test_an_asynchronous_loop_counts_discarded_groups(warm, tmp_path):
    """Of the 48 questions of step 1, 16 train in each of two steps; those left in the third are too old."""
    run = tmp_path / "run"
    changes = {
        STEPS: 3,
        MINIBATCH: 8,
        "coca__broken_groups": 1,
        "coca__method": {"entropy_bonus": 0.05},
        "trainer__v1": {
            "trainer_mode": "coca_colocate_async",
            "colocate_async": {"num_warmup_batches": 2},
            "sampler": {"max_off_policy_threshold": 2, "max_off_policy_strategy": "drop"},
        },
        "algorithm__rollout_correction": {"rollout_is": "token"},
        "trainer__save_freq": 3,
        "trainer__test_freq": 3,
        "trainer__checkpoint_callback_class": "coca_mindspeed.verl.checkpoints.BestCheckpoint",
    }
    finished(tiny.configuration(warm, run, **changes), **keeping(run), COCA_TEST_SESSION_FAILS="37")
    method = method_settings(entropy_bonus=0.05)
    assert_same_gradient(warm, run, method, ranks=1, minibatches=2)
    rows = kept(run, 3)  # old log-probs are of the trained weights, those of the rollout of earlier ones
    written = pad_sequence([row["advantages"] for row in rows], batch_first=True)
    torch.testing.assert_close(credit(rows, method, 8)[0], written, rtol=0, atol=1e-5)
    assert not torch.allclose(credit(rows, method, 8, sampled="rollout_log_probs")[0], written, atol=1e-3)
    metrics = loop.metrics(run)
    assert [metrics[step]["group/discarded"] for step in (1, 2)] == [0, 0]
    assert 1 <= metrics[3]["group/discarded"] <= 16
    assert sum(metrics[step]["group/broken"] for step in (1, 2, 3)) == 1
    versions = {step: [row["versions"] for row in kept(run, step)] for step in (1, 2, 3)}
    assert {version for pair in versions[1] for version in pair} == {0}
    assert min(oldest for oldest, _ in versions[2]) == 0, "a step trains on what the weights before its own sampled"
    assert any(oldest < newest for step in (2, 3) for oldest, newest in versions[step]), "interrupted and resumed"
    for step in (1, 2, 3):
        dump = loop.rollouts(run, step)
        assert len(dump) == 128
        assert all(len({row["id"] for row in dump[start : start + 8]}) == 1 for start in range(0, 128, 8))
    best = json.loads((run / "checkpoints" / "best" / "best.json").read_text())
    assert best == {"metric": "eval/brier", "step": 3, "value": metrics[3]["eval/brier"]}
    assert (run / "checkpoints" / "best" / "global_step_3" / "actor").is_dir()


def test_a_failing_session_ends_a_run_that_allows_none(warm, tmp_path):
    config = tiny.configuration(warm, tmp_path / "run", **{STEPS: 1})
    code = loop.start(config, modules=MEDDLING, COCA_TEST_SESSION_FAILS="37").wait()
    log = loop.log_of(tmp_path / "run")
    assert code != 0
    assert "1 of 16 groups" in log, log[-4000:]
    assert "coca.broken_groups" in log


def test_sequential_changes_its_reward_half_way(warm, tmp_path):
    run = tmp_path / "run"
    finished(tiny.configuration(warm, run, **{STEPS: 2, "coca__method": {"name": "sequential"}}), **BY_TURNS)
    assert [loop.metrics(run)[step]["stage"] for step in (1, 2)] == [0.0, 1.0]
    for step in (1, 2):
        for row in loop.rollouts(run, step):
            assert row["confidence_advantage"] == pytest.approx(row["answer_advantage"])
    flat = [row for row in loop.rollouts(run, 1) if row["gesr"] == 0]
    assert flat
    assert all(row["answer_advantage"] == 0 for row in flat), "the first stage rewards correctness alone"
    assert any(row["answer_advantage"] for row in loop.rollouts(run, 2) if row["gesr"] == 0)


def test_a_grader_and_a_method_of_ones_own_reach_every_worker(warm, tmp_path):
    run = tmp_path / "run"
    keys = {
        STEPS: 1,
        "coca__method": {"name": f"{custom_code.__file__}:Shy"},
        "coca__grader": f"{custom_code.__file__}:last_digit",
    }
    finished(tiny.configuration(warm, run, **keys), **BY_TURNS)
    rows = loop.rollouts(run, 1)
    assert {row["verdict"] for row in rows} == {"right", "wrong"}
    for row in rows:
        assert (row["verdict"] == "right") == (row["response"].rstrip()[-1:] == row["gold"][-1])
    assert any(row["answer_advantage"] for row in rows)
    confidence, answer = ([row[f"{segment}_advantage"] for row in rows] for segment in ("confidence", "answer"))
    assert confidence == pytest.approx(answer, abs=1e-4)  # one reward


@pytest.mark.parametrize("name", ["rlcr", "dcpo", "caliber"])
def test_methods_that_state_a_confidence_after_the_answer(tmp_path, name):
    warm, run = tmp_path / "warm", tmp_path / "run"
    warm.mkdir()
    tiny.write_model(warm / "model", method=name, warm_up_steps=200)
    tiny.write_questions(warm, name, train=64, evaluate=16)
    stages = len(training_method(name).stages)
    finished(tiny.configuration(warm, run, **{STEPS: stages, "coca__method": {"name": name}}), **keeping(run))
    assert_same_gradient(warm, run, method_settings(name), ranks=1, minibatches=1)
    last, rows = loop.metrics(run)[stages], loop.rollouts(run, stages)
    after = "confidence_after" if name == "caliber" else "confidence"
    assert 1 < last[f"response/{after}_length"] < last["response/length"]
    assert last["rollout/invalid_share"] < 0.5
    assert any(row["response"].rstrip().endswith("</confidence>") for row in rows)
    apart = [row for row in rows if row[f"{after}_advantage"] != pytest.approx(row["answer_advantage"])]
    assert bool(apart) == (name != "rlcr")
