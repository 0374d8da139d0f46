"""What the benchmark calls MindSpeed-RL's own GRPO is MindSpeed-RL's own, but for what lets it run on this machine."""

import pytest

from tests.integration.mindspeed.environment import needs_mindspeed, printed_by

pytestmark = [*needs_mindspeed, pytest.mark.slow]


def test_everything_but_the_hosts_rollout_is_mindspeed_rls() -> None:
    facts = printed_by("tests.integration.mindspeed.own_grpo_facts")["FACTS"]
    numbering = facts["used"].pop("rollout")
    assert numbering[0] == "coca_mindspeed.mindspeed.stages.rollout_engine"
    for name, (module, qualified) in facts["used"].items():
        assert module.startswith(("mindspeed_rl.", "cli.")), f"{name}: {module}.{qualified}"
    assert facts["used"]["loss"] == ["mindspeed_rl.models.loss.grpo_actor_loss_func", "GRPOActorLossFunc"]
    assert facts["used"]["advantages"][1] == "compute_advantage"
    assert {"IntegratedWorker", "ActorHybridWorkerBase", "ReferenceWorkerBase"} <= set(facts["bases"])
    assert "ActorWithoutReference" not in facts["bases"]
    assert "coca_mindspeed.mindspeed.stages.actor_loss" not in facts["stages"]
    assert "coca_mindspeed.mindspeed.stages.trainer" not in facts["stages"]
