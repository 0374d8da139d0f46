"""A whole loop on a checkout to which patches/*.patch is applied: only the hooks of platform host act at run time."""

import os
import shutil
from pathlib import Path

import pytest

from coca_mindspeed.mindspeed.hooks import patched_hooks
from coca_mindspeed.upstream.manifest import manifest_directory, matching_manifest
from tests.integration.mindspeed.environment import needs_mindspeed
from tests.integration.mindspeed.runs import run_and_check
from tests.mindspeed.test_patch_export import apply_patch

pytestmark = [*needs_mindspeed, pytest.mark.slow, pytest.mark.timeout(1800)]


def test_the_loop_runs_on_a_patched_checkout(warm, tmp_path, ray_directory):
    root = tmp_path / "mindspeed_rl"
    for folder in ("cli", "mindspeed_rl", "configs"):
        shutil.copytree(Path(os.environ["MINDSPEED_RL_HOME"], folder), root / folder)
    manifest = matching_manifest(root)
    apply_patch(manifest_directory() / f"mindspeed_rl_{manifest.release}.patch", root)
    assert len(patched_hooks(manifest, root)) > 20
    run_and_check(warm, tmp_path, ray_directory, {}, MINDSPEED_RL_HOME=str(root))
