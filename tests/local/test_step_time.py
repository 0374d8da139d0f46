"""Estimated hours of a local run: the arithmetic by hand, and that measuring leaves the policy as it was."""

import pytest
import torch

from coca_mindspeed.cli import main
from coca_mindspeed.config.compose import compose_run
from coca_mindspeed.config.schema import ModelConfig
from coca_mindspeed.local.policy import load_policy
from coca_mindspeed.local.step_time import PassSeconds, measure_passes, step_seconds
from coca_mindspeed.local.tiny_model import write_tiny_model

RUN = (
    *("model=tiny", "data=arithmetic", "rollout.prompts=4", "rollout.group_size=2"),
    *("trainer.minibatches=1", "trainer.epochs=2"),
)


@pytest.mark.parametrize(
    ("more", "rollout", "update"),
    [
        # 4 x 10 prompt tokens at .01 s, then twice 20 tokens of a batch at .5 s; twice 4 x 10 + 8 x 20 tokens
        (("rollout.batch_responses=5",), 0.4 + 20, 0.4),
        (("rollout.batch_responses=null",), 0.4 + 10, 0.4),
        (("rollout.batch_responses=1",), 0.4 + 40, 0.4),  # at least one whole group
        (("trainer.share_prompts=false", "rollout.batch_responses=5"), 0.4 + 20, 0.48),
    ],
)
def test_the_seconds_of_a_step(more, rollout, update):
    config = compose_run("local", [*RUN, *more]).run
    seconds = step_seconds(config, PassSeconds(0.01, 0.5, 0.001), prompt=10, response=20)
    assert seconds == pytest.approx((rollout, update))


@pytest.mark.parametrize("lengths", [(1, 1), (300, 200)])
def test_measuring_leaves_the_policy_as_it_was(tmp_path, lengths):
    write_tiny_model(tmp_path / "tiny", 0)
    policy = load_policy(tmp_path / "tiny", ModelConfig(), torch.device("cpu"))
    before = [parameter.detach().clone() for parameter in policy.model.parameters()]
    sizes = [f"rollout.max_prompt_tokens={lengths[0]}", f"rollout.max_new_tokens={lengths[1]}"]
    passes = measure_passes(policy, compose_run("local", [*RUN, *sizes]).run)
    assert min(passes) > 0
    for parameter, old in zip(policy.model.parameters(), before, strict=True):
        assert parameter.grad is None
        assert torch.equal(parameter, old)


def test_check_prints_hours_and_reads_the_records(tmp_path, capsys):
    write_tiny_model(tmp_path / "tiny", 0)
    (tmp_path / "bad.jsonl").write_text('{"question": "What is 1 + 1?", "anwser": "2"}\n')
    bad = ["data=records", f"data.train={tmp_path / 'bad.jsonl'}", f"data.evaluate={tmp_path / 'bad.jsonl'}"]
    assert main(["check", "local", *bad, f"model.path={tmp_path / 'tiny'}"]) == 1
    assert "bad.jsonl:1: " in capsys.readouterr().err
    run = [
        "local",
        "data=arithmetic",
        f"model.path={tmp_path / 'tiny'}",
        "rollout.max_prompt_tokens=64",
        "evaluation.preflight=0",
    ]
    assert main(["check", *run, "rollout.max_new_tokens=32"]) == 0
    hours = [line.split() for line in capsys.readouterr().out.splitlines() if " for 200 steps of " in line]
    assert [(line[-5], line[-2]) for line in hours] == [("8", "4"), ("64", "32")]


def test_check_measures_the_adapters_that_are_trained(tmp_path, monkeypatch, capsys):
    """Weights in float32 and gradients of all of them would take more memory than the run."""
    pytest.importorskip("peft")
    write_tiny_model(tmp_path / "tiny", 0)
    measured = []

    def measure(policy, config):
        measured.append(policy)
        return PassSeconds(1.0, 1.0, 1.0)

    monkeypatch.setattr("coca_mindspeed.local.step_time.measure_passes", measure)
    lora = ["model.lora.rank=2", "model.lora.base_dtype=bfloat16"]
    run = ["local", "data=arithmetic", f"model.path={tmp_path / 'tiny'}", "rollout.max_prompt_tokens=64", *lora]
    run += ["evaluation.preflight=0"]
    assert main(["check", *run, "rollout.max_new_tokens=32"]) == 0
    [policy] = measured
    dtypes = {(parameter.requires_grad, parameter.dtype) for parameter in policy.model.parameters()}
    assert dtypes == {(True, torch.float32), (False, torch.bfloat16)}


@pytest.mark.parametrize(("epochs", "steps"), [("2", 20), ("0.05", None)])  # of 40 questions, 4 a step
def test_check_counts_the_steps_of_epochs(tmp_path, monkeypatch, capsys, epochs, steps):
    write_tiny_model(tmp_path / "tiny", 0)
    monkeypatch.setattr("coca_mindspeed.local.step_time.measure_passes", lambda *_: PassSeconds(1.0, 1.0, 1.0))
    run = ["local", "data=arithmetic", "data.train_size=40", f"data.epochs={epochs}", "rollout.prompts=4"]
    lengths = ["rollout.max_prompt_tokens=64", "rollout.max_new_tokens=32", "evaluation.preflight=0"]
    assert main(["check", *run, *lengths, f"model.path={tmp_path / 'tiny'}"]) == (0 if steps else 1)
    captured = capsys.readouterr()
    assert captured.out.count(f" for {steps} steps of ") == (2 if steps else 0)
    assert ("no-whole-step" in captured.err) == (steps is None)
