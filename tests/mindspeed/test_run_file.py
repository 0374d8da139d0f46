"""From a run to what the driver reads, stage by stage; resuming; and the converter's command line."""

import functools
import stat
import sys
from pathlib import Path

import pytest
import yaml

from coca_mindspeed.cli import main
from coca_mindspeed.config.compose import compose_run
from coca_mindspeed.errors import ConfigError
from coca_mindspeed.mindspeed import conversion
from coca_mindspeed.mindspeed.plan import make_plan
from coca_mindspeed.mindspeed.resolved_config import resolve_config
from coca_mindspeed.mindspeed.start.driver import compose_config, split_config
from coca_mindspeed.mindspeed.start.run_file import RUN_FILE, StageFiles, mindspeed_values, stages_to_do, write_run_file
from tests.mindspeed.builders import checkpoint, model_config, write

RUN = "qwen25_7b_910b"
CONFIG = model_config(compose_run(RUN).run)
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


def arguments_of(direction, *overrides, output=Path("runs/x")):
    run, _ = planned(*overrides)
    return conversion.converter_arguments(direction, run, resolve_config(run), output)


def following(arguments, option):
    return arguments[arguments.index(option) + 1]


def test_the_converter_gets_the_runs_layout():
    there = arguments_of("hf2mcore", "mindspeed_rl.actor_config.pipeline_model_parallel_size=2")
    assert following(there, "--target-tensor-parallel-size") == "4"
    assert following(there, "--target-pipeline-parallel-size") == "2"
    assert following(there, "--load-dir").endswith("models/Qwen2.5-7B-Instruct")
    assert following(there, "--save-dir").endswith("models/Qwen2.5-7B-Instruct-mcore-tp4-pp2")
    assert "--add-qkv-bias" in there


def test_the_last_stage_there_is_is_converted(tmp_path):
    """Whatever method the command line names; it would be the first stage's otherwise, and nobody would know."""
    checkpoint(tmp_path / "stage0/checkpoints", 4, iteration="981")
    (tmp_path / "stage1" / "checkpoints").mkdir(parents=True)
    (tmp_path / "stage_of_mine").mkdir()
    assert conversion.newest_stage(tmp_path) == tmp_path / "stage0" / "checkpoints"
    checkpoint(tmp_path / "stage1/checkpoints", 4, iteration="400")
    assert following(arguments_of("mcore2hf", output=tmp_path), "--load-dir") == str(tmp_path / "stage1/checkpoints")


def test_conversion_leaves_the_original_model_alone(tmp_path, homes):
    model = tmp_path / "model"
    run = compose_run(RUN, [f"model.path={model}", f"model.megatron_path={tmp_path / 'mcore'}"]).run
    facts, output = resolve_config(run), tmp_path / "out"
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        conversion.prepare("hf2mcore", run, facts, output)
    original(model, "tokenizer.json", "model.safetensors.index.json", "model.safetensors")
    conversion.prepare("hf2mcore", run, facts, output)
    checkpoint(tmp_path / "mcore", 2)
    with pytest.raises(ConfigError, match="TP 4, PP 1, found TP 2, PP 1"):
        conversion.finish("hf2mcore", run, facts, output)
    checkpoint(tmp_path / "mcore", 4)
    assert "TP 4, PP 1" in conversion.finish("hf2mcore", run, facts, output)
    with pytest.raises(ConfigError, match=r"^model\.megatron_path="):
        conversion.prepare("hf2mcore", run, facts, output)

    with pytest.raises(ConfigError, match="stage0/checkpoints"):
        conversion.prepare("mcore2hf", run, facts, output)
    checkpoint(output / "stage0/checkpoints", 4, iteration="10")
    conversion.prepare("mcore2hf", run, facts, output)
    converter_runs(output, weights=False)
    with pytest.raises(ConfigError, match=r"/mg2hf: "):
        conversion.finish("mcore2hf", run, facts, output)
    assert untouched(model)
    conversion.prepare("mcore2hf", run, facts, output)  # anew: what is left of the failure is no obstacle
    converter_runs(output)
    conversion.finish("mcore2hf", run, facts, output)
    assert {path.name for path in (output / "hf").iterdir()} == {"config.json", "tokenizer.json", "model.safetensors"}
    assert (output / "hf/config.json").read_text() == "new"
    assert not (output / "hf.converting").exists()
    assert untouched(model)


def converter_runs(output, *, weights=True, target="hf"):
    """What MindSpeed-LLM's converter does to its --save-dir: the new folder, and then the mode of every file."""
    frame = output / f"{target}.converting"
    if weights:
        write(frame / conversion.NEW_WEIGHTS / "model.safetensors", "new")
        write(frame / conversion.NEW_WEIGHTS / "config.json", "new")
    for path in frame.rglob("*"):
        if path.is_file():
            path.chmod(0o640)


def original(model, *names):
    """A read-only model with the shapes of the run."""
    for name in ("config.json", *names):
        write(model / name, CONFIG if name == "config.json" else "old").chmod(0o444)


def untouched(model):
    return all(
        path.read_text() in ("old", CONFIG) and stat.S_IMODE(path.stat().st_mode) == 0o444 for path in model.iterdir()
    )


@pytest.mark.parametrize("direction", ["hf2mcore", "mcore2hf"])
def test_weights_of_another_shape_are_refused_before_the_converter_starts(tmp_path, homes, direction):
    model, output = tmp_path / "model", tmp_path / "out"
    run = compose_run(RUN, [f"model.path={model}", f"model.megatron_path={tmp_path / 'mcore'}"]).run
    checkpoint(output / "stage0/checkpoints", 4, iteration="10")
    write(model / "tokenizer.json")
    write(model / "config.json", model_config(run, num_hidden_layers=27))
    with pytest.raises(ConfigError) as caught:
        conversion.prepare(direction, run, resolve_config(run), output)
    assert [(problem.code, problem.key) for problem in caught.value.problems] == [
        ("model", "config.json: num_hidden_layers")
    ]
    write(model / "config.json", model_config(run))
    conversion.prepare(direction, run, resolve_config(run), output)


def test_a_conversion_without_torch_is_refused(trained, monkeypatch, capsys):
    model, output = trained
    monkeypatch.setitem(sys.modules, "torch", None)
    assert main_of_conversion(output, f"model.path={model}") == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "torch" in line


def main_of_conversion(output, *words):
    return conversion.main(["mcore2hf", RUN, *words, "--output", str(output)])


@pytest.fixture
def trained(tmp_path, homes):
    """A read-only model, and a finished run that started from it."""
    model, output = tmp_path / "model", tmp_path / "out"
    original(model, "tokenizer.json", "model-00001-of-00001.safetensors")
    checkpoint(output / "stage0/checkpoints", 4, iteration="10")
    return model, output


def test_a_conversion_that_was_never_moved_is_not_deleted(trained):
    model, output = trained
    run = compose_run(RUN, [f"model.path={model}"]).run
    facts = resolve_config(run)
    conversion.prepare("mcore2hf", run, facts, output)
    converter_runs(output)
    assert not untouched(model)  # killed before finish
    with pytest.raises(ConfigError, match=r"/mg2hf: .* mcore2hf .*--finish"):
        conversion.prepare("mcore2hf", run, facts, output)
    assert untouched(model)
    assert main_of_conversion(output, f"model.path={model}", "--finish") == 0
    assert (output / "hf" / "model.safetensors").read_text() == "new"


def test_a_chosen_iteration_is_converted_beside_the_newest(trained, monkeypatch, capsys):
    """The converter reads what latest_checkpointed_iteration.txt names; the run's own file is left alone."""
    model, output = trained
    checkpoints = checkpoint(output / "stage0/checkpoints", 4, iteration="20")
    (checkpoints / "iter_0000030").mkdir()  # of an interrupted save
    options = [f"model.path={model}", "--iteration"]
    for absent in ("15", "30"):
        assert main_of_conversion(output, *options, absent) == 1
        assert "[10, 20]" in capsys.readouterr().err

    def convert(arguments, **_):
        loaded = Path(following(arguments, "--load-dir"))
        assert (loaded / "latest_checkpointed_iteration.txt").read_text() == "10"
        assert [path.resolve() for path in loaded.glob("iter_*")] == [checkpoints / "iter_0000010"]
        converter_runs(output, target="hf-10")
        return 0

    monkeypatch.setattr(conversion, "run_child", convert)
    assert main_of_conversion(output, *options, "10") == 0
    assert (checkpoints / "latest_checkpointed_iteration.txt").read_text() == "20"
    assert (output / "hf-10" / "model.safetensors").read_text() == "new"
    assert {path.name for path in output.iterdir()} == {"hf-10", "stage0"}
    assert untouched(model)
    assert (checkpoints / "iter_0000010" / "mp_rank_00" / "model_optim_rng.pt").is_file()
