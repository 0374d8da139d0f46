"""Hooks that act beside an NPU alone, against the real classes of both releases (see npu_only.py)."""

import os
import subprocess
import sys

import pytest

from tests.integration.mindspeed.environment import REPOSITORY, environment, needs_mindspeed

pytestmark = needs_mindspeed

CHECKOUTS = {"2.3.0": "MINDSPEED_RL_HOME", "master": "MINDSPEED_RL_MASTER_HOME"}


@pytest.mark.parametrize("release", CHECKOUTS)
def test_what_upstream_does_and_what_it_does_hooked(release):
    home = os.environ.get(CHECKOUTS[release])
    if home is None:
        pytest.skip(f"needs a checkout of {release}: {CHECKOUTS[release]} not set")
    paths = os.pathsep.join([home, environment()["PYTHONPATH"]])
    done = subprocess.run(
        [sys.executable, "-m", "tests.integration.mindspeed.npu_only", release],
        cwd=REPOSITORY,
        env=environment(MINDSPEED_RL_HOME=home, PYTHONPATH=paths, RANK="0", WORLD_SIZE="1"),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
