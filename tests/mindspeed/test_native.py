"""YAML files in MindSpeed-RL's own layout with a section ``coca``: every command takes them as they are.

``starts.tsv`` has the values that are accepted, refused and written (command ``native``).
"""

import os
from pathlib import Path

import pytest
import yaml

from coca_mindspeed.cli import main
from coca_mindspeed.config.compose import compose_run
from coca_mindspeed.errors import ConfigError, UsageError
from coca_mindspeed.mindspeed import conversion
from coca_mindspeed.mindspeed.cluster_run import ClusterRun
from coca_mindspeed.mindspeed.native import compose_cluster_run
from coca_mindspeed.mindspeed.plan import make_plan
from coca_mindspeed.mindspeed.start.run_file import StageFiles, mindspeed_values, stage_marker, write_run_file
from coca_mindspeed.utils.directories import MARKER
from tests.mindspeed.builders import NATIVE, checkpoint, write
from tests.mindspeed.test_patch_export import CHECKOUTS


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    return write(tmp_path / "grpo.yaml", NATIVE)


def test_check_doctor_and_dry_runs_take_the_file(file, tmp_path, capsys):
    changes = ["actor_config.lr=3e-6", "coca.method=joint"]
    assert main(["check", str(file), *changes, "--write", "written.yaml", "--output", "run"]) == 0
    written = yaml.safe_load(Path("written.yaml").read_text())
    assert (written["actor_config"]["lr"], written["coca"]["method"]["name"]) == (3e-6, "joint")
    assert "launch/run.sh" in capsys.readouterr().out
    assert main(["launch", str(file), *changes, "--dry-run", "--output", "run"]) == 0
    shown = capsys.readouterr().out
    assert yaml.safe_load(shown.partition(f"{MARKER}\n")[2].partition("\n+ ")[0]) == written
    assert main(["doctor", str(file), *changes]) == 1
    shown = capsys.readouterr().out
    assert not any(
        ours in shown for ours in ("mindspeed_rl.", "hardware=", "data.train", "model.path", "checkpoint.keep")
    )
    assert conversion.main(["hf2mcore", str(file), "--dry-run"]) == 0
    assert "--target-tensor-parallel-size 4" in capsys.readouterr().out


def test_a_trial_is_two_iterations(file, capsys):
    assert main(["launch", str(file), "--trial", "--dry-run"]) == 0
    values = yaml.safe_load(capsys.readouterr().out.partition(f"{MARKER}\n")[2].partition("\n+ ")[0])
    assert (values["megatron_training"]["train_iters"], values["megatron_training"]["save_interval"]) == (2, 2)


def test_nodes_are_those_of_the_environment(file, monkeypatch, capsys):
    monkeypatch.setenv("NNODES", "2")
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.1")
    assert main(["launch", str(file), "--dry-run"]) == 0
    assert "600 16 NPU" in capsys.readouterr().out
    assert main(["launch", str(file), "coca.nodes=1", "--dry-run"]) == 2


def test_the_cluster_that_the_environment_names_is_joined(file, monkeypatch, capsys):
    assert main(["launch", str(file), "--dry-run"]) == 0
    assert "--head" in capsys.readouterr().out
    assert "RAY_ADDRESS" not in os.environ
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.9:6379")
    assert main(["launch", str(file), "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "+ join 10.0.0.9:6379" in shown
    assert "--head" not in shown
    monkeypatch.setenv("NNODES", "2")
    monkeypatch.setenv("NODE_RANK", "1")
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.1")
    assert main(["launch", str(file), "--dry-run"]) == 2


def test_a_smoke_run_is_refused(file):
    assert main(["launch", str(file), "--smoke"]) == 2


@pytest.mark.parametrize("command", ["config show", "train"])
def test_the_local_engine_does_not_take_the_file(command, file, capsys):
    assert main([*command.split(), str(file), *(["--output", "run"] if command == "train" else [])]) == 1
    assert "coca-mindspeed check" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("override", "keys"),
    [
        ("parallel=tp4", ["actor_config.tensor_model_parallel_size"]),
        ("model=qwen3_8b", ["megatron_training.num_layers", "megatron_training.tokenizer_name_or_path"]),
        ("hardware=ascend_910b", ["coca.npu_memory_gib"]),
        ("optimizer.lr=3e-6", ["actor_config.lr"]),
        ("method.entropy_bonus=0.1", ["coca.method.entropy_bonus"]),
    ],
)
def test_groups_and_keys_of_ours_name_theirs(override, keys, file):
    with pytest.raises(UsageError) as caught:
        compose_cluster_run(str(file), [override])
    assert all(key in str(caught.value) for key in keys)


@pytest.mark.parametrize("name", ["qwen25_7b_910b", "qwen3_8b_910c", "llama31_8b"])
def test_the_file_that_check_writes_is_such_a_file(name, tmp_path):
    """It has the same layout, and starts the same run."""
    overrides = ["model=llama31_8b"] if name == "llama31_8b" else []
    run = compose_run("qwen25_7b_910b" if overrides else name, overrides).run
    first = mindspeed_values(ClusterRun(run), ClusterRun(run).iterations, StageFiles(tmp_path))
    write_run_file(tmp_path / "run.yaml", first, name)
    native = compose_cluster_run(str(tmp_path / "run.yaml")).run
    paths = {"load"}  # absolute in the file
    resolved = [ClusterRun(each).resolved.model_dump(exclude=paths) for each in (run, native)]
    assert resolved[0] == resolved[1]
    plan = make_plan(native)
    assert plan.problems == ()
    assert mindspeed_values(plan.start, plan.iterations, StageFiles(tmp_path)) == first


def test_a_run_of_the_file_is_resumed(file, capsys):
    run = compose_cluster_run(str(file)).run
    values = mindspeed_values(ClusterRun(run), 500, StageFiles(Path("run")))
    stage_marker(values).write(Path("run/stage0"), resumed=False)
    checkpoint(Path("run/stage0/checkpoints"), 4, iteration="100")
    resumed = ["launch", str(file), "--resume", "--dry-run", "--output", "run"]
    assert main(resumed) == 0
    values = yaml.safe_load(capsys.readouterr().out.partition(f"{MARKER}\n")[2].partition("\n+ ")[0])
    assert (
        values["actor_config"]["load"]
        == values["actor_config"]["save"]
        == str(Path("run/stage0/checkpoints").absolute())
    )
    for change in ("actor_config.lr=1e-5", "rl_config.n_samples_per_prompt=4", "coca.method=joint"):
        assert main([*resumed, change]) == 1
        assert change.partition("=")[0] in capsys.readouterr().err
    assert main(["launch", str(file), "--dry-run", "--output", "run"]) == 1


PASTED = "[base, {override /model: qwen25_7b}, {override /hardware: ascend_910b}, {override /data: big_math}, _self_]"


@pytest.mark.parametrize("defaults", ["[qwen25_7b_910b, _self_]", "[mine, _self_]", PASTED])
def test_sections_pasted_into_a_file_of_ours_are_named_with_their_place(tmp_path, capsys, defaults):
    """In a file that stands on a run of ours, itself or by another file."""
    write(tmp_path / "mine.yaml", "defaults: [qwen25_7b_910b, _self_]\n")
    actor, rl = "{lr: 1e-6, micro_batch_size: 2}", "{n_samples_per_prompt: 8, mini_batch_size: 64}"
    file = write(tmp_path / "pasted.yaml", f"defaults: {defaults}\nactor_config: {actor}\nrl_config: {rl}\n")
    assert main(["check", str(file)]) == 1
    shown = capsys.readouterr().err
    assert "mindspeed_rl.actor_config" in shown
    assert "rollout.group_size and trainer.minibatches" in shown


def test_files_that_name_each_other(tmp_path):
    for name, other in (("one", "two"), ("two", "one")):
        write(tmp_path / f"{name}.yaml", f"defaults: [{other}, _self_]\nactor_config: {{lr: 1e-6}}\n")
    with pytest.raises(ConfigError, match=r"one\.yaml"):
        compose_cluster_run(str(tmp_path / "one.yaml"))


def test_a_file_that_cannot_be_composed(tmp_path, monkeypatch):
    monkeypatch.delenv("MINDSPEED_RL_HOME", raising=False)
    file = write(tmp_path / "grpo.yaml", f"defaults:\n  - model: [qwen25_7b]\n{NATIVE.partition('}')[2]}")
    with pytest.raises(ConfigError, match="MINDSPEED_RL_HOME"):
        compose_cluster_run(str(file))


# Name -> overrides besides the data, and the code of the problem that is left.
SEED = "generate_config.sampling_config.seed=null"
GRPO = {
    "grpo_deepseek_r1_671b_A2": ([], "mixture-of-experts"),
    "grpo_deepseek_r1_671b_A3": ([], "mixture-of-experts"),
    "grpo_deepseek_r1_671b_A3_eplb": ([], "mixture-of-experts"),
    "grpo_qwen3_235b_a22b_A2": ([], "mixture-of-experts"),
    "grpo_qwen25_32b_A2": ([SEED], None),
    "grpo_qwen25_32b_A3": ([SEED, "actor_config.micro_batch_size=1"], None),
    "grpo_qwen25_7b_A3": ([], None),
    "grpo_qwen3_8b_A3": ([], None),
}


@pytest.mark.published
@pytest.mark.parametrize("release", CHECKOUTS)
@pytest.mark.parametrize("name", GRPO)
def test_mindspeed_rls_own_files(release, name, monkeypatch):
    home = os.environ.get(CHECKOUTS[release])
    if not home:
        pytest.skip(f"needs {CHECKOUTS[release]} (docs/port.md)")
    monkeypatch.setenv("MINDSPEED_RL_HOME", home)
    overrides, expected = GRPO[name]
    file = str(Path(home) / "configs" / f"{name}.yaml")
    try:
        plan = make_plan(compose_cluster_run(file, ["megatron_training.data_path=train.jsonl", *overrides]).run)
        problems = plan.problems
    except ConfigError as error:
        problems = error.problems
    assert [problem.code for problem in problems[:1]] == ([expected] if expected else [])
