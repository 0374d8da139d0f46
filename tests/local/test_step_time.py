"""Time of a local run by ``check``: of a step that was run."""

import pytest
import torch

from coca_mindspeed.cli import check, main
from coca_mindspeed.local import step_time
from coca_mindspeed.local.tiny_model import write_tiny_model

RUN = ("data=arithmetic", "rollout.max_prompt_tokens=64", "rollout.max_new_tokens=32", "rollout.prompts=4")


@pytest.fixture
def tiny(tmp_path):
    write_tiny_model(tmp_path / "tiny", 0)
    return tmp_path / "tiny"


def checked(tiny, *more: str) -> int:
    return main(["check", "local", *RUN, f"model.path={tiny}", "trainer.device=cpu", "evaluation.preflight=0", *more])


def test_check_runs_one_step_and_multiplies_its_time(tiny, capsys, monkeypatch):
    weights = (tiny / "model.safetensors").read_bytes()
    monkeypatch.setattr(step_time.os, "getloadavg", lambda: (3.25, 0.0, 0.0))
    steps = []

    def run_step(*arguments):
        steps.append(step_time_of(*arguments))
        return steps[-1]._replace(rollout=2.0, update=7.0)

    step_time_of = step_time.run_step
    monkeypatch.setattr(step_time, "run_step", run_step)
    assert checked(tiny) == 0
    [step] = steps
    assert step.clock == "processor"
    assert min(step[1:]) > 0
    time, total = capsys.readouterr().out.splitlines()[-3:-1]
    assert "load 3.2 on" in time
    assert total.startswith("200 such steps: about 30 min of processor time")
    assert (tiny / "model.safetensors").read_bytes() == weights


def test_a_step_that_takes_too_long_is_stopped(tiny, capsys, monkeypatch):
    monkeypatch.setattr(check, "_LONGEST_STEP", 0.01)
    assert checked(tiny) == 0
    assert "such steps" not in (shown := capsys.readouterr().out)
    assert "trainer.steps=2" in shown


def test_a_step_trains_adapters_in_the_run_s_formats(tiny, monkeypatch):
    """Weights in float32 and gradients of all of them would take more memory than the run."""
    pytest.importorskip("peft")
    updated = []
    monkeypatch.setattr(step_time, "update_policy", lambda policy, *_: updated.append(policy))
    assert checked(tiny, "model.lora.rank=2", "model.lora.base_dtype=bfloat16") == 0
    [policy] = updated
    dtypes = {(parameter.requires_grad, parameter.dtype) for parameter in policy.model.parameters()}
    assert dtypes == {(True, torch.float32), (False, torch.bfloat16)}


@pytest.mark.parametrize(("epochs", "steps"), [("2", 20), ("0.05", None)])  # of 40 questions, 4 a step
def test_check_counts_the_steps_of_epochs(tiny, monkeypatch, capsys, epochs, steps):
    found = step_time.StepTime("processor", 1.0, 1.0, 1.0, 1.0)
    monkeypatch.setattr(step_time, "run_step", lambda *_: found)
    assert checked(tiny, "data.train_size=40", f"data.epochs={epochs}") == (0 if steps else 1)
    captured = capsys.readouterr()
    assert (f"{steps} such steps: about 40 s" in captured.out) == (steps is not None)
    assert ("no-whole-step" in captured.err) == (steps is None)
