"""The update of a policy on judged responses: what it says of them."""

import copy

import pytest
import torch

from coca_mindspeed.local.experience import respond_and_grade, reward_and_advantage
from coca_mindspeed.local.schedule import generator
from coca_mindspeed.local.update import update_policy
from tests.local.runs_for_tests import small_session


@pytest.fixture(scope="module")
def session(tmp_path_factory):
    return small_session(tmp_path_factory.mktemp("session") / "run")


@pytest.fixture(scope="module")
def experience(session):
    trainer, config = session.trainer, session.trainer.config
    graded = respond_and_grade(
        trainer.policy,
        trainer.train_records[:8],
        trainer.grader,
        trainer.method,
        config.method,
        config.rollout,
        generator(trainer.policy.device, 0, "test"),
        config.rollout.group_size,
    )
    return reward_and_advantage(graded, config.method, 0, trainer.policy.device)


def updated(session, experience, **trainer_settings):
    """Weights and metrics after one update by plain descent, in which a gradient shows as it is."""
    trainer = session.trainer
    settings = trainer.config.trainer.model_copy(update={"minibatches": 1, **trainer_settings})
    config = trainer.config.model_copy(update={"trainer": settings})
    before = copy.deepcopy(trainer.policy.model.state_dict())
    optimizer = torch.optim.SGD(trainer.policy.model.parameters(), lr=1.0)
    metrics = update_policy(trainer.policy, experience, optimizer, 1.0, config)
    after = torch.cat([p.detach().flatten() for p in trainer.policy.model.parameters()])
    trainer.policy.model.load_state_dict(before)
    return after, metrics


def test_entropy_of_each_segment_is_that_of_the_sampler(session, experience):
    """Before its first update the policy is the one that sampled, so both segments' sums add up to the sampler's."""
    _, metrics = updated(session, experience)
    samples, masks = experience.graded.samples, experience.masks
    total = sum(
        metrics[f"{name}/entropy"] * float(mask.sum())
        for name, mask in (("confidence", masks.confidence), ("answer", masks.answer))
    )
    assert metrics["confidence/entropy"] != pytest.approx(metrics["answer/entropy"], rel=1e-3)
    assert total == pytest.approx(float((samples.entropy * samples.lengths).sum()), rel=1e-4)
