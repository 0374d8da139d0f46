"""A whole loop on a patched checkout: only the hooks of platform host act at run time."""

import os
import shutil
from pathlib import Path

import pytest

from coca_mindspeed.mindspeed.hooks import applied_patch, export_patch
from coca_mindspeed.upstream.manifest import matching_manifest
from tests.integration.mindspeed.environment import needs_mindspeed
from tests.integration.mindspeed.runs import run_and_check
from tests.mindspeed.test_patch_export import apply_patch

pytestmark = [*needs_mindspeed, pytest.mark.slow, pytest.mark.timeout(1800)]


def test_the_loop_runs_on_a_patched_checkout(warm, tmp_path, ray_directory):
    root = tmp_path / "mindspeed_rl"
    for folder in ("cli", "mindspeed_rl", "configs"):
        shutil.copytree(Path(os.environ["MINDSPEED_RL_HOME"], folder), root / folder)
    manifest = matching_manifest(root)
    patch = tmp_path / "a.patch"
    patch.write_text(export_patch(manifest, root))
    apply_patch(patch, root)
    assert applied_patch(manifest, root) is not None
    run_and_check(warm, tmp_path, ray_directory, {}, MINDSPEED_RL_HOME=str(root))
