"""What the comparisons of whole loops make of what a run reports, and which hooks MindSpeed-RL's own GRPO is given."""

import pytest

from benchmarks import loops_in_turn, mindspeed_own_grpo, update_at_real_size
from coca_mindspeed.upstream.manifest import load_manifests


def test_figures_come_from_a_process_of_their_own():
    """At a size that is none; the update is called by hand, in both of its ways."""
    sizes = ("--responses=2", "--tokens=24", "--vocabulary=500")
    whole = loops_in_turn.in_a_process("benchmarks.update_at_real_size", *sizes, "--json")
    adapters = update_at_real_size.measure(2, 24, 500, 4300, lora=2)
    assert whole["seconds"] > 0
    assert 0 < adapters["objective/grad_norm"] < whole["objective/grad_norm"]


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
