"""Whole loops of ``train`` with MindSpeed-RL's own rollout engine and resharding (vLLM, CPU build, patched)."""

import pytest

from tests.integration.mindspeed import tiny
from tests.integration.mindspeed.runs import copy_of, finish, going_on, metrics_of, run_and_check, start_driver
from tests.integration.mindspeed_vllm.environment import INSTALLED, needs_vllm

pytestmark = [*needs_vllm, pytest.mark.slow, pytest.mark.timeout(1800)]

VLLM = {"coca": {"rollout": "vllm"}}
TWO = {"actor_resource": {"num_npus": 2}}
TP2 = {"tensor_model_parallel_size": 2}
LOOPS = {
    "tied Qwen2 at TP1": ("tied Qwen2", {}),
    "TP2 to TP2": (
        "tied Qwen2",
        {"actor_config": TP2, "rl_config": TWO, "generate_config": {"infer_tensor_parallel_size": 2}},
    ),
    "TP2 to TP1": ("tied Qwen2", {"actor_config": TP2, "rl_config": TWO}),
    "PP2": (
        "tied Qwen2",
        {"actor_config": {"pipeline_model_parallel_size": 2}, "rl_config": {**TWO, "mini_batch_size": 8}},
    ),
    "DP2": ("tied Qwen2", {"actor_config": {"micro_batch_size": 16}, "rl_config": {**TWO, "blocking": False}}),
    "Llama 3 at TP1": ("Llama 3", {}),
}


@pytest.mark.parametrize("loop", LOOPS)
def test_the_loop_runs_at(loop, folder_of, tmp_path, ray_directory):
    model, changes = LOOPS[loop]
    run_and_check(folder_of(model, warm=True), tmp_path, ray_directory, {**changes, **VLLM}, **INSTALLED.home)
    assert f"Initializing a V1 LLM engine (v{INSTALLED.pin}" in (tmp_path / "log").read_text()


def test_a_resumed_run_repeats_the_one_that_was_not_stopped(folder_of, tmp_path, ray_directory):
    """From the checkpoint in the middle of a run that ended; vLLM is handed the weights of that checkpoint."""
    directory = copy_of(folder_of("tied Qwen2", warm=True), tmp_path)
    # Otherwise the dock hands prompts out in an order that nobody has seeded; on one rank it cannot be guaranteed.
    changes = {**VLLM, "actor_config": {"micro_batch_size": 16}, "rl_config": {**TWO, "guarantee_order": True}}
    config = tiny.configuration(directory, megatron_training={"train_iters": 4, "save_interval": 2}, **changes)
    finish(start_driver(directory, config, ray_directory, **INSTALLED.home), directory)
    first = metrics_of(directory)
    (directory / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("2")
    finish(start_driver(directory, going_on(config, directory), ray_directory, **INSTALLED.home), directory)
    rows = metrics_of(directory)
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert rows[:2] == first[:2]
    assert all(row["rollout/log_prob_gap"] < 1e-4 for row in rows)
    for before, after in zip(first[2:], rows[2:], strict=True):
        assert 0 < after["actor/grad_norm"] < float("inf")
        for name in ("reward/confidence", "reward/answer", "actor/grad_norm", "actor/pg_loss"):
            assert after[name] == pytest.approx(before[name], rel=1e-5, abs=1e-7), name
