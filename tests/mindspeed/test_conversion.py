"""Weights between Hugging Face and Megatron: the converter's command line, and the files around its run."""

import stat
import sys
from pathlib import Path

import pytest

from coca_mindspeed.config.compose import compose_run
from coca_mindspeed.errors import ConfigError
from coca_mindspeed.mindspeed import conversion
from coca_mindspeed.mindspeed.cluster_run import ClusterRun
from coca_mindspeed.mindspeed.start.process import CPU_SHIM
from tests.mindspeed.builders import checkpoint, model_config, write
from tests.support import mindspeed_host

RUN = "qwen25_7b_910b"
CONFIG = model_config(compose_run(RUN).run)


def arguments_of(direction, *overrides, output=Path("runs/x")):
    run = compose_run(RUN, overrides).run
    return conversion.converter_arguments(direction, ClusterRun(run), output)


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
    """The method on the command line does not choose the stage: a wrong one would convert an earlier model unseen."""
    checkpoint(tmp_path / "stage0/checkpoints", 4, iteration="981")
    (tmp_path / "stage1" / "checkpoints").mkdir(parents=True)
    (tmp_path / "stage_of_mine").mkdir()
    assert conversion.newest_stage(tmp_path) == tmp_path / "stage0" / "checkpoints"
    checkpoint(tmp_path / "stage1/checkpoints", 4, iteration="400")
    assert following(arguments_of("mcore2hf", output=tmp_path), "--load-dir") == str(tmp_path / "stage1/checkpoints")


def test_conversion_leaves_the_original_model_alone(tmp_path, homes):
    model = tmp_path / "model"
    run = compose_run(RUN, [f"model.path={model}", f"model.megatron_path={tmp_path / 'mcore'}"]).run
    output = tmp_path / "out"
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        conversion.prepare("hf2mcore", ClusterRun(run), output)
    original(model, "tokenizer.json", "model.safetensors.index.json", "model.safetensors")
    conversion.prepare("hf2mcore", ClusterRun(run), output)
    checkpoint(tmp_path / "mcore", 2)
    with pytest.raises(ConfigError, match="TP 4, PP 1, found TP 2, PP 1"):
        conversion.finish("hf2mcore", ClusterRun(run), output)
    checkpoint(tmp_path / "mcore", 4)
    assert "TP 4, PP 1" in conversion.finish("hf2mcore", ClusterRun(run), output)
    with pytest.raises(ConfigError, match=r"^model\.megatron_path="):
        conversion.prepare("hf2mcore", ClusterRun(run), output)

    with pytest.raises(ConfigError, match="stage0/checkpoints"):
        conversion.prepare("mcore2hf", ClusterRun(run), output)
    checkpoint(output / "stage0/checkpoints", 4, iteration="10")
    conversion.prepare("mcore2hf", ClusterRun(run), output)
    converter_runs(output, weights=False)
    with pytest.raises(ConfigError, match=r"/mg2hf: "):
        conversion.finish("mcore2hf", ClusterRun(run), output)
    assert untouched(model)
    conversion.prepare("mcore2hf", ClusterRun(run), output)  # anew: what is left of the failure is no obstacle
    converter_runs(output)
    conversion.finish("mcore2hf", ClusterRun(run), output)
    assert {path.name for path in (output / "hf").iterdir()} == {"config.json", "tokenizer.json", "model.safetensors"}
    assert (output / "hf/config.json").read_text() == "new"
    assert not (output / "hf.converting").exists()
    assert untouched(model)


def converter_runs(output, *, weights=True, target="hf"):
    """Stand in for MindSpeed-LLM's converter: it makes a folder in --save-dir, and then changes every file's mode."""
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
        conversion.prepare(direction, ClusterRun(run), output)
    assert [(problem.code, problem.key) for problem in caught.value.problems] == [
        ("model", "config.json: num_hidden_layers")
    ]
    write(model / "config.json", model_config(run))
    conversion.prepare(direction, ClusterRun(run), output)


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
    conversion.prepare("mcore2hf", ClusterRun(run), output)
    converter_runs(output)
    assert not untouched(model)  # killed before finish
    with pytest.raises(ConfigError, match=r"/mg2hf: .* mcore2hf .*--finish"):
        conversion.prepare("mcore2hf", ClusterRun(run), output)
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


def test_a_run_that_check_refuses_is_not_converted(capsys):
    typed = "mindspeed_rl.actor_config.tensor_model_parallel_size=3"
    assert conversion.main(["hf2mcore", "qwen25_7b_910b", typed, "--dry-run"]) == 1
    assert "tp-heads" in capsys.readouterr().err


@pytest.mark.parametrize("hardware", ["ascend_910b", "host"])
def test_the_converter_runs_on_the_hardware_of_the_run(trained, homes, monkeypatch, hardware):
    """In its own checkout; on CPUs by the shim, whose stubs stand in for the packages of NPUs that it imports."""
    model, output = trained
    typed = (f"hardware={hardware}", "hardware.npus_per_node=4", "hardware.nodes=1", f"model.path={model}")
    commands = []

    def run_child(command, *, cwd, **_):
        assert cwd == homes["MINDSPEED_LLM_HOME"]
        commands.append(command[1:3])
        converter_runs(output)
        return 0

    monkeypatch.setattr(conversion, "run_child", run_child)
    monkeypatch.delenv(CPU_SHIM, raising=False)
    if hardware == "host":
        assert main_of_conversion(output, *typed) == 1
        assert not (output / "hf.converting").exists()
    monkeypatch.setenv(CPU_SHIM, mindspeed_host.__name__)
    assert main_of_conversion(output, *typed) == 0
    shim = [str(Path(mindspeed_host.__file__).parent)]
    assert commands == [[*shim, "convert_ckpt.py"] if hardware == "host" else ["convert_ckpt.py", "--use-mcore-models"]]
    assert (output / "hf" / "model.safetensors").read_text() == "new"


def test_weights_for_megatron_need_a_place(homes, tmp_path, capsys):
    """``hardware=host`` trains without; the folder ``None`` would take them."""
    original(tmp_path / "model", "tokenizer.json")
    words = [
        "hf2mcore",
        RUN,
        "hardware=host",
        "hardware.npus_per_node=4",
        f"model.path={tmp_path / 'model'}",
        "model.megatron_path=null",
    ]
    assert conversion.main([*words, "--dry-run"]) == 1
    assert "[no-weights]" in capsys.readouterr().err
