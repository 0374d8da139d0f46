"""From a run to what the driver reads, stage by stage; and resuming."""

import functools
from pathlib import Path

import pytest
import yaml

from coca_mindspeed.cli import main
from coca_mindspeed.config.compose import compose_run
from coca_mindspeed.errors import ConfigError
from coca_mindspeed.mindspeed.plan import make_plan
from coca_mindspeed.mindspeed.start.driver import compose_config, split_config
from coca_mindspeed.mindspeed.start.run_file import RUN_FILE, StageFiles, mindspeed_values, stages_to_do, write_run_file
from tests.mindspeed.builders import checkpoint, write

RUN = "qwen25_7b_910b"
GPU = "mindspeed_rl.generate_config.gpu_memory_utilization"


@functools.cache
def planned(*overrides):
    run = compose_run(RUN, overrides).run
    return run, make_plan(run).iterations


def values_of(output, *overrides, stage=0, resume=False):
    return mindspeed_values(*planned(*overrides), StageFiles(output, stage), resume=resume)


def test_a_new_run(tmp_path):
    values = values_of(tmp_path, "logging.wandb=coca", "optimizer.warmup_steps=196")
    actor = values["actor_config"]
    assert values["megatron_training"]["train_iters"] == 1961
    assert actor["lr_warmup_fraction"] == 196 / 1961
    assert (actor["finetune"], actor["no_load_optim"]) == (True, True)
    assert actor["load"] == str(Path("models/Qwen2.5-7B-Instruct-mcore-tp4-pp1").absolute())
    assert actor["save"] == str(tmp_path / "stage0" / "checkpoints")
    assert values["coca"]["output_dir"] == str(tmp_path / "stage0")
    assert Path(values["megatron_training"]["data_path"]).is_absolute()
    rl = values["rl_config"]
    assert (rl["use_wandb"], rl["wandb_project"], rl["wandb_exp_name"]) == (True, "coca", tmp_path.name)


def test_resuming_takes_weights_and_optimizer_from_the_checkpoint(tmp_path):
    with pytest.raises(ConfigError, match="--resume"):
        values_of(tmp_path, resume=True)
    with pytest.raises(ConfigError, match=r"data\.epochs"):
        values_of(tmp_path, "data.rows=null")
    checkpoint(tmp_path / "stage0/checkpoints", 4, iteration="50")
    actor = values_of(tmp_path, resume=True)["actor_config"]
    assert actor["load"] == actor["save"] == str(tmp_path / "stage0/checkpoints")
    assert (actor["finetune"], actor["no_load_optim"], actor["no_load_rng"]) == (False, False, False)


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("method=joint", "coca.method.name"),
        ("data.train=other.jsonl", "megatron_training.data_path"),
        ("seed=7", "megatron_training.seed"),
        ("rollout.temperature=0.7", "generate_config.sampling_config.temperature"),
        ("mindspeed_rl.rl_config.init_kl_coef=0.1", "rl_config.init_kl_coef"),
    ],
)
def test_settings_of_another_run_are_refused(tmp_path, override, key):
    """Megatron itself refuses nothing but another learning rate or length."""
    write_run_file(write(StageFiles(tmp_path).results / RUN_FILE), values_of(tmp_path), RUN)
    checkpoint(tmp_path / "stage0/checkpoints", 4, iteration="50")
    with pytest.raises(ConfigError) as caught:
        values_of(tmp_path, override, "data.rows=251122", resume=True)
    assert ("another-run", key) in [(problem.code, problem.key) for problem in caught.value.problems]
    values_of(tmp_path, "checkpoint.interval=10", "evaluation.interval=25", f"{GPU}=0.6", resume=True)


@pytest.mark.parametrize(
    ("stored", "problems"),
    [
        ({"advantage_ddof": None, "separate_format": None}, []),
        ({"advantage_ddof": 0}, ["coca.method.advantage_ddof"]),
        ({"a_key_of_then": 1}, ["coca.method.a_key_of_then"]),
    ],
)
def test_keys_that_a_later_release_adds_have_their_defaults_in_an_earlier_run(tmp_path, stored, problems):
    """``stored`` are keys of the method in the run to resume, None for one that it does not have."""
    values = values_of(tmp_path)
    coca = {**values["coca"], "method": {**values["coca"]["method"], **stored}}
    coca["method"] = {key: value for key, value in coca["method"].items() if value is not None}
    del coca["require_evaluated"]
    write_run_file(write(StageFiles(tmp_path).results / RUN_FILE), {**values, "coca": coca}, RUN)
    checkpoint(tmp_path / "stage0/checkpoints", 4, iteration="50")
    if not problems:
        assert values_of(tmp_path, resume=True)["actor_config"]["finetune"] is False
        return
    with pytest.raises(ConfigError, match=RUN_FILE) as caught:
        values_of(tmp_path, resume=True)
    assert [problem.key for problem in caught.value.problems] == problems


def test_a_second_stage_begins_with_its_own_first_stages_weights(tmp_path):
    """It has no checkpoint yet, and what was trained before it may have been anything."""
    file = StageFiles(tmp_path).results / RUN_FILE
    run, iterations = planned("data.rows=90000", "evaluation.interval=0")
    write_run_file(write(file), mindspeed_values(run, iterations, StageFiles(tmp_path)), RUN)
    checkpoint(tmp_path / "stage0/checkpoints", 4, iteration=str(iterations))
    run, iterations = planned("data.rows=90000", "evaluation.interval=0", "method=sequential")
    assert stages_to_do(run, iterations, tmp_path, resume=True) == [(1, False)]
    second = StageFiles(tmp_path, 1)
    with pytest.raises(ConfigError) as caught:
        mindspeed_values(run, iterations, second)
    assert ("another-run", "coca.method.name") in [(problem.code, problem.key) for problem in caught.value.problems]
    write_run_file(file, mindspeed_values(run, iterations, StageFiles(tmp_path)), RUN)
    assert mindspeed_values(run, iterations, second)["coca"]["stage"] == 1


def test_a_run_file_that_is_damaged_is_named(tmp_path):
    checkpoint(tmp_path / "stage0/checkpoints", 4, iteration="50")
    for text in ("a: [", "7"):
        write(StageFiles(tmp_path).results / RUN_FILE, text)
        with pytest.raises(ConfigError, match=RUN_FILE):
            values_of(tmp_path, resume=True)


def test_the_second_stage_starts_with_the_first_ones_weights(tmp_path):
    values = values_of(tmp_path, "method=sequential", stage=1)
    actor = values["actor_config"]
    assert (actor["load"], actor["save"]) == tuple(str(tmp_path / f"stage{i}/checkpoints") for i in (0, 1))
    assert (actor["finetune"], values["coca"]["stage"], values["coca"]["method"]["name"]) == (True, 1, "sequential")
    with pytest.raises(ConfigError, match="stage 1"):
        values_of(tmp_path, stage=1)


def test_the_reference_stays_what_the_run_began_with(tmp_path):
    kl = "mindspeed_rl.rl_config.init_kl_coef=0.05"
    begun = str(Path("models/Qwen2.5-7B-Instruct-mcore-tp4-pp1").absolute())
    assert "integrated_mode_config" not in values_of(tmp_path)["rl_config"]
    checkpoint(tmp_path / "stage0/checkpoints", 4, iteration="50")
    for how in ({}, {"resume": True}, {"stage": 1}):
        rl = values_of(tmp_path, kl, "method=sequential", **how)["rl_config"]
        assert rl["integrated_mode_config"] == {"ref_model_load_path": begun}
    path = "+mindspeed_rl.rl_config.integrated_mode_config.ref_model_load_path=/ref"
    assert values_of(tmp_path, kl, path)["rl_config"]["integrated_mode_config"] == {"ref_model_load_path": "/ref"}
    with pytest.raises(ConfigError, match="init_kl_coef"):
        values_of(tmp_path, kl, "model.megatron_path=null")


def with_interval(run, interval):
    return run.model_copy(update={"evaluation": run.evaluation.model_copy(update={"interval": interval})})


def test_a_resume_without_a_run_names_the_runs_nearby(tmp_path):
    run, iterations = planned("data.epochs=null", "trainer.steps=100")
    checkpoint(tmp_path / "right/stage0/checkpoints", 4, iteration="50")
    for typed in (tmp_path / "rihgt", tmp_path):
        with pytest.raises(ConfigError, match=str(tmp_path / "right")) as caught:
            stages_to_do(run, iterations, typed, resume=True)
        assert [(problem.code, problem.key) for problem in caught.value.problems] == [("no-run", "--output")]


def test_stages_still_to_do(tmp_path):
    run, iterations = planned("method=sequential", "data.epochs=null", "trainer.steps=100")
    assert stages_to_do(run, iterations, tmp_path, resume=False) == [(0, False), (1, False)]
    checkpoint(tmp_path / "stage0/checkpoints", 4, iteration="50")
    assert stages_to_do(run, iterations, tmp_path, resume=True) == [(0, True), (1, False)]
    with pytest.raises(ConfigError, match="--output"):
        stages_to_do(run, iterations, tmp_path, resume=False)
    checkpoint(tmp_path / "stage0/checkpoints", 4, iteration="100")
    for validated in (None, '{"step": 50}\n{"step": 100, "ev'):  # of the last weights it is missing
        if validated is not None:
            write(tmp_path / "stage0/validation.jsonl", validated)
        assert stages_to_do(run, iterations, tmp_path, resume=True) == [(0, True), (1, False)]
    without = with_interval(run, 0)
    assert stages_to_do(without, iterations, tmp_path, resume=True) == [(1, False)]
    assert stages_to_do(run, 60, tmp_path, resume=True) == [(1, False)], "there is nothing to validate it by"
    write(tmp_path / "stage0/validation.jsonl", '{"step": 100}\n')
    assert stages_to_do(run, iterations, tmp_path, resume=True) == [(1, False)]
    checkpoint(tmp_path / "stage1/checkpoints", 4, iteration="100")
    (tmp_path / "stage1/validation.jsonl").write_text('{"step": 100}\n')
    assert stages_to_do(run, iterations, tmp_path, resume=True) == []


def test_check_writes_what_the_driver_reads(tmp_path):
    file = tmp_path / "out" / "mindspeed_rl.yaml"
    file.parent.mkdir(parents=True, exist_ok=True)
    assert main(["check", RUN, "method=joint", "--output", str(tmp_path), "--write", str(file)]) == 0
    assert file.read_text().startswith("# MindSpeed-RL's configuration of the run qwen25_7b_910b")
    settings, config = split_config(compose_config(file, [], tmp_path))
    assert (settings.method.name, settings.platform, settings.eval_interval) == ("joint", "npu", 50)
    assert config.actor_config.tensor_model_parallel_size == 4
    assert yaml.safe_load(file.read_text())["megatron_training"]["model"] in config.model
