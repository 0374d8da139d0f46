"""launch/verl.sh: its plan, its commands, and what it refuses; without verl on the keys of its configuration."""

import importlib.util
import json
import os
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch.scripts_for_tests import call, call_here, commands, ended, own_address, written
from tests.mindspeed.builders import write

SCRIPT = Path(__file__).parents[2] / "launch" / "verl.sh"

pytestmark = pytest.mark.usefixtures("verls_keys")


def test_dry_run_shows_the_plan_and_verls_own_command():
    run = "coca_qwen25_7b_megatron"
    shown = call(SCRIPT, run, "--dry-run", "--output", "/nowhere/run", "trainer.n_gpus_per_node=16")
    assert shown.returncode == 0, shown.stderr
    assert f"plan of {run} on verl" in shown.stdout
    assert "16 on 1 node" in shown.stdout
    *_, last = commands(shown.stdout)
    configs = shlex.quote(str(SCRIPT.parents[1] / "configs" / "verl"))
    assert f"-m verl.trainer.main_ppo --config-dir {configs} --config-name {run} " in last
    assert f"file://{SCRIPT.parents[1]}/configs/verl" in last  # a file elsewhere finds ours
    assert "checkpoints" in last
    assert last.endswith("trainer.n_gpus_per_node=16")
    assert not Path("/nowhere").exists()
    typed = call(SCRIPT, run, "--dry-run", "--output", "/nowhere/run", "trainer.resume_mode=disable")
    assert typed.returncode == 2
    assert "trainer.resume_mode" in typed.stderr


def test_several_nodes_are_rays_own_commands():
    nodes = {"NNODES": "2", "MASTER_ADDR": "10.0.0.1"}
    head = call_here(SCRIPT, "coca_qwen25_7b", "--dry-run", **nodes, NODE_RANK="0")
    assert head.returncode == 0, head.stderr
    assert "16 on 2 nodes" in head.stdout
    doctor, start, wait, train = commands(head.stdout)
    assert doctor.startswith("+ coca-mindspeed doctor coca_qwen25_7b")
    assert "upstream.ray_cluster start 600 --block --head --port=6766 --node-ip-address=10.0.0.1" in start
    assert wait == "+ wait 600 2 nodes"
    assert train.endswith("trainer.nnodes=2")
    other = call_here(SCRIPT, "coca_qwen25_7b", "--dry-run", **nodes, NODE_RANK="1")
    *_, join = commands(other.stdout)
    assert join.endswith("ray_cluster start 600 --block --address=10.0.0.1:6766")


def test_a_run_continues_from_checkpoints_only_with_resume(stand_in):
    tmp_path, environment = stand_in
    arguments = ("coca_qwen25_7b", "--dry-run", "--output", str(tmp_path))
    assert call_here(SCRIPT, *arguments, "--resume", **environment).returncode == 1
    other_node = {**environment, "NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "10.0.0.1"}
    assert call_here(SCRIPT, *arguments, "--resume", **other_node).returncode == 0
    tracker = tmp_path / "checkpoints" / "latest_checkpointed_iteration.txt"
    tracker.parent.mkdir()
    tracker.write_text("50")
    assert call_here(SCRIPT, *arguments, **environment).returncode == 1
    resumed = call_here(SCRIPT, *arguments, "--resume", **environment)
    assert resumed.returncode == 0
    assert "trainer.resume_mode=auto" in resumed.stdout
    for typed in (tmp_path.parent, tmp_path.with_name("typo")):
        assert str(tmp_path) in call_here(SCRIPT, *arguments[:-1], str(typed), "--resume", **environment).stderr


def test_smoke_is_the_same_method_on_the_tiny_model_and_a_cpu(tmp_path):
    """On this machine, whatever the environment says of nodes."""
    shown = call_here(SCRIPT, "coca_qwen25_7b", "--smoke", "--dry-run", "--output", str(tmp_path / "run"), NNODES="2")
    assert shown.returncode == 0, shown.stderr
    assert "trainer.nnodes=1" in shown.stdout
    assert "trainer.nnodes=2" not in shown.stdout
    _, make, train = commands(shown.stdout)
    assert f"verl_smoke {tmp_path}/run/tiny" in make
    assert "actor_rollout_ref.rollout.name=host" in train
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("npus", "eager", "driver", "norm", "code"), [(True, ["true"], "7", 1.0, 7), (False, [], "0", 0.0, 1)]
)
def test_a_trial_is_two_steps_of_the_run_itself_and_eager_on_npus(stand_in, npus, eager, driver, norm, code):
    """It ends with verl's exit code, or with 1 if its metrics fail."""
    folder, environment = stand_in
    environment["DRIVER_EXIT"] = driver
    write(folder / "run/metrics.jsonl", json.dumps({"step": 1, "data": {"actor/grad_norm": norm}}) + "\n")
    if npus:
        environment["PYTHONPATH"] = f"{write(folder / 'npu/torch_npu.py').parent}:{os.environ.get('PYTHONPATH', '')}"
    words = ["coca_qwen25_7b", "--trial", "data.seed=1", "--output", str(folder / "run")]
    ran = call(SCRIPT, *words, **environment)
    assert ran.returncode == code, ran.stderr
    assert ("[no_gradient]" in ran.stderr) == (code == 1)
    [log] = (folder / "run" / "logs").iterdir()
    assert "verl.trainer.main_ppo" in log.read_text()
    words = (folder / "driver").read_text().split()
    values = dict(word.split("=", 1) for word in words if "=" in word)
    lengths = {"trainer.total_training_steps": "2", "trainer.save_freq": "2", "trainer.test_freq": "-1"}
    assert values.items() >= lengths.items()
    assert values["RAY_ADDRESS"] == "local"  # another Ray of this machine is not joined
    assert values["hydra.run.dir"].strip("'") == str(folder / "run" / "hydra")
    of_ray = "++ray_kwargs.ray_init.runtime_env.env_vars"  # also of a cluster that is there already
    assert values[f"{of_ray}.VERL_FILE_LOGGER_PATH"].strip("'") == str(folder / "run" / "metrics.jsonl")
    assert [value for key, value in values.items() if key.endswith("enforce_eager")] == eager
    assert words[-1] == "data.seed=1"


def test_a_signal_while_nodes_are_waited_for_is_acted_upon_at_once(stand_in):
    folder, environment = stand_in
    nodes = {"NNODES": "2", "MASTER_ADDR": own_address(), "CLUSTER_SLEEPS": "1"}
    process = subprocess.Popen(
        ["bash", str(SCRIPT), "coca_qwen25_7b", "--output", str(folder / "run")],
        env={**os.environ, **environment, **nodes},
        stdout=subprocess.DEVNULL,
    )
    written(folder / "ray")
    with socket.create_server((nodes["MASTER_ADDR"], int(environment["RAY_PORT"]))):  # as the head's own
        written(folder / "training")
        process.terminate()
        assert process.wait(timeout=300) == 143  # the child would sleep for longer
    assert ended(int((folder / "training").read_text()))
    assert (folder / "ray").read_text().splitlines()[-1] == "stopped"


@pytest.mark.skipif(importlib.util.find_spec("verl") is not None, reason="verl is installed")
@pytest.mark.parametrize("options", [("--smoke",), (), ("--dry-run",)])
def test_without_verl_its_install_command_and_guide_are_named(tmp_path, options):
    refused = call(SCRIPT, "coca_qwen25_7b", *options, "--output", str(tmp_path / "run"), PYTHONPATH="")
    assert refused.returncode == 1
    assert all(text in refused.stderr for text in (".venv-verl/.installed", "docs/verl.md", sys.executable))
    assert not (tmp_path / "run").exists()
