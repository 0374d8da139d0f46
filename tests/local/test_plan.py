"""The plan of a local run."""

import pytest

from coca_mindspeed.config.compose import compose_run
from coca_mindspeed.local.plan import make_plan
from tests.local.models_for_tests import write_random_model

RUN = ("rollout.prompts=8", "rollout.group_size=4", "rollout.max_prompt_tokens=30", "rollout.max_new_tokens=10")


@pytest.mark.parametrize(
    ("overrides", "row", "shown"),
    [
        ("", "step", "8 prompts x 4 responses = 32"),
        ("trainer.minibatches=2 trainer.ppo_epochs=3", "updates per step", "6 of 4 prompts"),
        ("trainer.microbatch_prompts=2", "microbatches", "2 prompts"),
        ("trainer.minibatches=4", "microbatches", "2 prompts"),
        ("trainer.microbatch_tokens=512", "microbatches", "up to 512 tokens"),
        ("", "tokens", "30 + 10 at most"),
        ("evaluation.interval=5", "evaluation while training", "every 5 steps"),
        ("evaluation.interval=0", "evaluation while training", "none"),
        ("checkpoint.interval=7 checkpoint.keep=3", "checkpoints", "1 MB every 7 steps, the newest 3 are kept"),
        ("checkpoint.interval=0", "checkpoints", "1 MB at the last step, the newest 2 are kept"),
        ("method=sequential trainer.steps=9", "length", "9 steps per stage"),
    ],
)
def test_rows_of_a_plan(overrides, row, shown):
    assert dict(make_plan(compose_run("demo", [*RUN, *overrides.split()]).run).rows)[row] == shown


def test_a_plan_that_does_not_fit_has_its_memory_and_the_problems(tmp_path, monkeypatch):
    model = write_random_model(tmp_path / "model", "qwen2")
    run = compose_run("local", [f"model.path={model}", "data.train=t.jsonl", "trainer.device=cpu", *RUN]).run
    assert make_plan(run).problems == ()
    monkeypatch.setattr("coca_mindspeed.local.plan.free_bytes", lambda _: 2**20)
    plan = make_plan(run)
    assert [problem.code for problem in plan.problems] == ["memory-update", "memory-rollout"]
    update, rollout = plan.memory
    assert (update.name, rollout.name, update.limit_gib) == ("update", "rollout", 1 / 1024)
    assert update.bytes_of("weights") == rollout.bytes_of("weights") > 0
    assert update.bytes_of("activations") > 0 == rollout.bytes_of("activations")
    assert update.gib > update.limit_gib
