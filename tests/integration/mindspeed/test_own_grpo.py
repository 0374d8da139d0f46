"""What the benchmark calls MindSpeed-RL's own GRPO is MindSpeed-RL's own, but for what lets it run on this machine."""

import json
import os
import subprocess
import sys

import pytest
from omegaconf import OmegaConf

from coca_mindspeed.mindspeed.start import driver
from coca_mindspeed.mindspeed.start.settings import VARIABLE, coca_settings
from tests.integration.mindspeed.environment import REPOSITORY, environment, needs_mindspeed

pytestmark = [*needs_mindspeed, pytest.mark.slow]


def test_everything_but_the_hosts_rollout_is_mindspeed_rls() -> None:
    settings = driver.for_processes(coca_settings({"platform": "host"}), OmegaConf.create({}), driver.homes(os.environ))
    process = subprocess.run(
        [sys.executable, "-m", "tests.integration.mindspeed.own_grpo_facts"],
        cwd=REPOSITORY,
        env=environment(**{VARIABLE: settings.model_dump_json()}),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert process.returncode == 0, process.stderr[-3000:]
    (line,) = [line for line in process.stdout.splitlines() if line.startswith("FACTS ")]
    facts = json.loads(line.removeprefix("FACTS "))
    numbering = facts["used"].pop("rollout")
    assert numbering[0] == "coca_mindspeed.mindspeed.stages.rollout_noise"
    for name, (module, qualified) in facts["used"].items():
        assert module.startswith(("mindspeed_rl.", "cli.")), f"{name}: {module}.{qualified}"
    assert facts["used"]["loss"] == ["mindspeed_rl.models.loss.grpo_actor_loss_func", "GRPOActorLossFunc"]
    assert facts["used"]["advantages"][1] == "compute_advantage"
    assert {"IntegratedWorker", "ActorHybridWorkerBase", "ReferenceWorkerBase"} <= set(facts["bases"])
    assert "ActorWithoutReference" not in facts["bases"]
    assert "coca_mindspeed.mindspeed.stages.actor_loss" not in facts["stages"]
    assert "coca_mindspeed.mindspeed.stages.trainer" not in facts["stages"]
