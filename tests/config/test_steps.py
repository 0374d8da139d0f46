"""Epochs become steps, in both engines by the same rule."""

import pytest

from coca_mindspeed.config.checks import with_steps
from coca_mindspeed.config.compose import compose_run
from coca_mindspeed.errors import ConfigError


def test_epochs_decide_where_they_are_given():
    run = compose_run("demo", ["data.epochs=0.5"]).run
    assert with_steps(run, 50_000).trainer.steps == 390  # 25,000 questions, 64 a step, what is left over is not used
    assert with_steps(run, 50_000).rollout == run.rollout
    plain = compose_run("demo").run
    assert with_steps(plain, 50_000) is plain
    with pytest.raises(ConfigError) as caught:
        with_steps(run, 100)
    assert [problem[:3] for problem in caught.value.problems] == [("no-whole-step", "data.epochs", 0.5)]


@pytest.mark.parametrize(
    ("text", "overrides", "refused"),
    [
        ("defaults: [demo, _self_]\ntrainer: {steps: 5}", [], False),
        ("defaults: [demo, _self_]\ntrainer: {steps: 5}", ["data.epochs=0.5"], False),
        ("defaults: [demo, _self_]\ntrainer: {steps: 5}\ndata: {epochs: 1}", [], False),  # as a run's config.yaml
        ("defaults: [demo, _self_]\ndata: {epochs: 1}", [], False),
        ("defaults: [demo, _self_]\ndata: {epochs: 1}", ["trainer.steps=5"], True),
        ("defaults: [demo, _self_]\ndata: {epochs: 1}", ["trainer.steps=5", "data.epochs=null"], False),
        ("defaults: [qwen25_7b_910b, _self_]\ntrainer: {steps: 5}", [], True),
        ("defaults: [qwen25_7b_910b, _self_]\ntrainer: {steps: 5}\ndata: {epochs: null}", [], False),
    ],
)
def test_steps_that_epochs_overrule_are_refused(text, overrides, refused, tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    if refused:
        with pytest.raises(ConfigError) as caught:
            compose_run(str(file), overrides)
        assert [(problem.code, problem.key) for problem in caught.value.problems] == [("no-effect", "trainer.steps")]
    else:
        compose_run(str(file), overrides)
