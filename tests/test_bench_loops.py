"""What the comparisons of whole loops make of what a run reports, and which hooks MindSpeed-RL's own GRPO is given."""

import pytest

from benchmarks import mindspeed_own_grpo
from coca_mindspeed.upstream.manifest import load_manifests


@pytest.mark.parametrize("manifest", load_manifests(), ids=lambda manifest: manifest.release)
def test_mindspeed_rls_own_grpo_is_given_the_hosts_hooks_alone(manifest):
    kept = mindspeed_own_grpo.of_the_host(manifest)
    by_us = {hook.replacement for hook in kept.hooks if ".mindspeed_host." not in str(hook.replacement)}
    assert by_us == {
        "coca_mindspeed.mindspeed.stages.rollout_engine:count_rollouts",
        "coca_mindspeed.mindspeed.stages.actor_worker:hooked_actor",
    }
    hosts = [hook.target for hook in manifest.hooks if hook.platform == "host" or hook.rollout == "transformers"]
    assert len(hosts) >= 6
    assert [hook.target for hook in kept.hooks if ".mindspeed_host." in str(hook.replacement)] == hosts
