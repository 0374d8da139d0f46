"""``examples/coca_in_one_file.py`` against the engine: same seed, same responses, same first gradient."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

from coca_mindspeed import token_text
from coca_mindspeed.algorithm.credit import CreditRule
from coca_mindspeed.local.load import load_policy
from coca_mindspeed.local.respond import respond
from coca_mindspeed.local.update import update_policy
from coca_mindspeed.scoring.responses import ResponseScorer
from tests.local.runs_for_tests import small_session

EXAMPLE = Path(__file__).parents[2] / "examples" / "coca_in_one_file.py"


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("coca_in_one_file", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.fixture(scope="module")
def session(tmp_path_factory):
    return small_session(tmp_path_factory.mktemp("one_file") / "run", "warm_up.steps=80", "trainer.minibatches=1")


def change(model, before):
    return torch.cat([(p.detach() - before[name]).flatten() for name, p in model.named_parameters()])


def test_it_takes_the_first_step_of_the_engine(example, session):
    trainer, config = session.trainer, session.trainer.config
    policy, path = trainer.policy, trainer.output / "warm_start"
    before = {name: p.detach().clone() for name, p in policy.model.named_parameters()}
    records = trainer.records[:24]
    size, draw = config.rollout.group_size, torch.Generator().manual_seed(5)
    rollout = respond(policy, records, config.method.system_prompt, config.rollout, draw, size)
    graded = ResponseScorer(config.method, policy.text, trainer.grader)(rollout, records)
    credited = graded.give_credit(CreditRule(config.method, 0), size)
    optimizer = torch.optim.SGD(policy.model.parameters(), lr=1.0)  # the step is the gradient
    metrics = update_policy(policy, rollout, credited, optimizer, 1.0, config)
    expected = change(policy.model, before)

    again = load_policy(path, config.model, torch.device("cpu"))
    settings = example.Settings(group_size=config.rollout.group_size, minibatches=1)
    found = example.step(
        again.model,
        again.tokenizer,
        token_text(again.tokenizer, again.model.config.vocab_size),
        [record.question for record in records],
        [record.answer for record in records],
        torch.optim.SGD(again.model.parameters(), lr=1.0),
        torch.Generator().manual_seed(5),
        settings,
    )
    assert found["accuracy"] == pytest.approx(float(graded.correct.mean()))
    assert found["confidence"] == pytest.approx(float(graded.stated.nanmean()))
    assert found["loss"] == pytest.approx(metrics["objective/loss"], abs=1e-5)
    assert float(expected.norm()) > 0.1
    assert float((change(again.model, before) - expected).norm()) < 1e-4 * float(expected.norm())
    assert bool(credited.credit.segments["confidence"].values.any()), (
        "the confidence segments should have something to learn"
    )


def test_its_settings_are_the_demos(example, session):
    config, settings = session.trainer.config, example.Settings()
    assert (settings.lr, settings.betas) == (config.optimizer.lr, config.optimizer.betas)
    assert settings.grad_clip == config.optimizer.grad_clip
    assert settings.max_new_tokens == config.rollout.max_new_tokens
    for name in ("clip", "advantage_eps", "confidence_decimals", "max_confidence_tokens"):
        assert getattr(settings, name) == getattr(config.method, name)
    assert config.rollout.temperature == 1.0
    assert config.method.loss_aggregation == "sum"


def test_it_is_short_and_knows_nothing_of_the_engine():
    source = EXAMPLE.read_text(encoding="utf-8")
    assert len(source.splitlines()) <= 300
    ours = {line.split()[1] for line in source.splitlines() if line.startswith("from coca_mindspeed")}
    assert ours == {"coca_mindspeed", "coca_mindspeed.data.arithmetic"}


def test_it_runs(example, session, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), str(session.trainer.output / "warm_start"), "--steps", "2"])
    example.main()
    assert "step 1: accuracy 0." in capsys.readouterr().out
