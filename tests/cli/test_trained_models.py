"""Models of runs and exports: the data type that they are computed in, and those of runs that were stopped."""

import json
import shutil

import pytest
import torch

from coca_mindspeed.cli import main
from coca_mindspeed.errors import ConfigError
from coca_mindspeed.local.policy import resolve_dtype
from coca_mindspeed.utils.directories import MARKER
from coca_router.cli import main as router
from tests.local.runs_for_tests import killed

PLAIN, FAST = {}, {"avx512_bf16": True}  # capabilities of a processor, without and with instructions for bfloat16


@pytest.fixture
def run_of(finished_demo, tmp_path):
    """A copy of the demo that says it was trained in a data type."""

    def copy(dtype):
        run = tmp_path / "run"
        shutil.copytree(finished_demo, run)
        marker = json.loads((run / MARKER).read_text())
        prompt = marker["prompt"]
        config = (run / "config.yaml").read_text()
        assert f"compute_dtype: {prompt['compute_dtype']}" in config
        (run / "config.yaml").write_text(config.replace(f"dtype: {prompt['compute_dtype']}", f"dtype: {dtype}"))
        (run / MARKER).write_text(json.dumps({**marker, "prompt": {**prompt, "compute_dtype": dtype}}))
        return run

    return copy


@pytest.fixture
def computed_in(monkeypatch):
    """The data type in which a command would compute, on a processor with some capabilities."""

    def dtype_of(command, features):
        resolved = []

        def load(path, config, device, **_):
            resolved.append(resolve_dtype(config, device))
            raise ConfigError("not loaded")

        monkeypatch.setattr("coca_mindspeed.local.load.load_policy", load)
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: features, raising=False)
        program, *arguments = map(str, command)
        assert (router if program == "coca-router" else main)(arguments) == 1
        return resolved.pop()

    return dtype_of


@pytest.mark.parametrize("features", [PLAIN, FAST])
@pytest.mark.parametrize("trained", ["float32", "bfloat16"])
def test_a_model_is_computed_as_it_was_trained_whatever_the_processor_has(
    run_of, computed_in, tmp_path, trained, features
):
    run, export, records = run_of(trained), tmp_path / "export", tmp_path / "records.jsonl"
    assert main(["export", str(run), "--output", str(export)]) == 0
    records.write_text('{"question": "2+3", "answer": "5"}\n')
    measure = ["baseline", "verbalised", "--data", records, "--output", tmp_path / "out", "--device", "cpu"]
    for model in (run, run / "model", export):
        assert computed_in(["coca-mindspeed", "ask", model, "2000+3000", "--device", "cpu"], features) == trained
        served = ["coca-router", "serve", "--model", model, "--device", "cpu"]
        assert computed_in(served, features) == trained
        assert computed_in([*served, "--raw-prompts"], features) == trained
        assert computed_in([*served, "--dtype", "float32"], features) == "float32"
        limits = ["--max-prompt-tokens", 100, "--max-new-tokens", 8, "--method", "coca"]
        assert computed_in(["coca-mindspeed", *measure, "--model", model, *limits], features) == trained


@pytest.mark.parametrize(("features", "asked"), [(PLAIN, "float32"), (FAST, "bfloat16")])
def test_a_model_that_does_not_say_its_data_type(run_of, computed_in, tmp_path, features, asked):
    model = run_of("float32") / "untrained"
    assert (
        computed_in(["coca-mindspeed", "ask", model, "2000+3000", "--max-tokens", 8, "--device", "cpu"], features)
        == asked
    )
    assert computed_in(["coca-router", "serve", "--model", model, "--device", "cpu"], features) == "float32"


def test_a_stopped_run_is_used_by_its_newest_checkpoint(finished_demo, tmp_path, capsys):
    run = killed(finished_demo, tmp_path / "run")
    (run / "summary.json").unlink()
    for command in (
        ["export", str(run), "--output", str(tmp_path / "export")],
        ["ask", str(run), "2+3", "--json"],
        ["ask", str(tmp_path / "export"), "2+3", "--json"],
    ):
        capsys.readouterr()
        main(command)
        printed = capsys.readouterr()
        assert ("step 4" in printed.err) == (str(run) in command)
    weights = [path / "model.safetensors" for path in (run / "checkpoints/step_000004/model", tmp_path / "export")]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    assert json.loads((tmp_path / "export/coca_prompt.json").read_text())["method"] == "coca"
    assert main(["export", str(run), "--output", str(tmp_path / "card"), "--card"]) == 1
    assert "summary.json" in capsys.readouterr().err


def test_a_checkpoint_of_adapters_is_no_model(finished_demo, tmp_path, capsys):
    run = killed(finished_demo, tmp_path / "run")
    (run / "checkpoints/step_000004/model").rename(run / "checkpoints/step_000004/adapters")
    for command in (["ask", str(run), "2+3"], ["export", str(run), "--output", str(tmp_path / "export")]):
        assert main(command) == 1
        assert "step_000004" in capsys.readouterr().err
    shutil.rmtree(run / "checkpoints")
    assert main(["ask", str(run), "2+3"]) == 1
    assert not (tmp_path / "export").exists()
