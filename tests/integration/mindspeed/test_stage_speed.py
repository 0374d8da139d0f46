"""What stands in for MindSpeed-RL's own costs no more: the reward-plus-advantage stage, and the packing of rows."""

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


def test_not_slower_than_upstream() -> None:
    settings = driver.for_processes(coca_settings({"platform": "host"}), OmegaConf.create({}), driver.homes(os.environ))
    process = subprocess.run(
        [sys.executable, "-m", "tests.integration.mindspeed.stage_speed"],
        cwd=REPOSITORY,
        env=environment(**{VARIABLE: settings.model_dump_json()}),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert process.returncode == 0, process.stderr[-3000:]
    for name in ("TIMES ", "PACKING "):
        (line,) = [line for line in process.stdout.splitlines() if line.startswith(name)]
        times = json.loads(line.removeprefix(name))
        print(line)
        # The best of many: other processes of the machine slow both down, but not evenly.
        assert times["ours"]["best"] <= times["upstream"]["best"]
