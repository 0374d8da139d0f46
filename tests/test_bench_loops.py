"""What the comparisons of whole loops make of what a run reports, and which hooks MindSpeed-RL's own GRPO is given."""

import json

import pytest

from benchmarks import loops_in_turn, mindspeed_own_grpo, update_at_real_size
from benchmarks.mindspeed_step_against_grpo import iterations
from coca_mindspeed.upstream.manifest import load_manifests

LOG = """\
(run pid=1) 2026-01-01 - INFO - [2026-01-01 00:00:00] INFO sync start grpo training at iteration: 0/2 ...
(run pid=1) 2026-01-01 - INFO - [2026-01-01 00:00:00] iteration: 1 / 2 | timing/all : 2.0000 | timing/update : 0.5000 \
| timing/rollout : 0.7500 | timing/non_overlap_adv : 9.0000 | actor/lr : 1.0e-06 | response_length/mean : 9.9000 | \
e2e_tps : 6.0000
(run pid=1) ModelProvider | something else | of another line
(run pid=1) 2026-01-01 - INFO - [2026-01-01 00:00:00] iteration: 2 / 2 | timing/all : 3.0000 | timing/update : 1.0000 \
| timing/rollout : 1.0000 | actor/grad_norm : nan | response_length/mean : 8.0000
"""


def test_what_mindspeed_rl_reports_is_read_from_its_log():
    first, second = iterations(LOG)
    assert first == {"update": 0.5, "rollout": 0.75, "between the stages": 0.75, "all": 2.0, "tokens": 9.9}
    assert second == {"update": 1.0, "rollout": 1.0, "between the stages": 1.0, "all": 3.0, "tokens": 8.0}


def test_ways_run_in_turn_and_the_least_of_each_is_shown(tmp_path):
    order = []

    def way(name, *values):
        def measure(number):
            order.append((name, number))
            return {"all": values[number], **({"reference": 1.0} if name == "theirs" else {"nothing": 0.0})}

        return measure

    output = tmp_path / "bench" / "it.json"
    least = loops_in_turn.in_turn({"ours": way("ours", 3.0, 2.0), "theirs": way("theirs", 4.0, 5.0)}, 2, output)
    assert order == [("ours", 0), ("theirs", 0), ("ours", 1), ("theirs", 1)]
    assert loops_in_turn.table(least, "ours") == [
        "|  | ours | theirs | ours / theirs |",
        "|---|---:|---:|---:|",
        "| all | 2.000 | 4.000 | 0.50 |",
        "| nothing | 0.000 |  |  |",
        "| reference |  | 1.000 |  |",
    ]
    written = json.loads(output.read_text())
    assert written["least"] == least
    assert [run["all"] for run in written["runs"]["theirs"]] == [4.0, 5.0]
    assert written["machine"]["processor"]


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
