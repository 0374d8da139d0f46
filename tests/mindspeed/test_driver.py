"""The driver beside its checks (``starts.tsv``): what it composes, processes of Ray, and how a training ends."""

import importlib.machinery
import os
import sys
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from coca_mindspeed.cli import main
from coca_mindspeed.errors import ConfigError, TrainingError
from coca_mindspeed.mindspeed.native import compose_config
from coca_mindspeed.mindspeed.start import driver, process
from coca_mindspeed.mindspeed.start.process import VARIABLE, CocaSettings, ProcessSettings
from tests.mindspeed.builders import mindspeed_config as _config
from tests.mindspeed.builders import write


def test_copies_of_the_others_in_mindspeed_rls_folder_do_not_win(homes, monkeypatch):
    for variable, package in driver.CHECKOUTS.items():
        for checkout in {homes[variable], homes["MINDSPEED_RL_HOME"]}:  # as MindSpeed-RL's guide has it
            write(checkout / package / "__init__.py")
    monkeypatch.setattr(driver, "matching_manifest", lambda _root: SimpleNamespace(release="2.3.0"))
    settings = driver.process_settings_of(CocaSettings(), _config(), homes)
    monkeypatch.setenv(VARIABLE, settings.model_dump_json())
    monkeypatch.setattr(process, "process_settings", lambda: settings)
    monkeypatch.setattr(process, "apply", lambda *_arguments, **_options: None)
    # Ray has put the folder in front, say because it was started there.
    monkeypatch.setattr(sys, "path", [str(homes["MINDSPEED_RL_HOME"]), *sys.path])
    process.setup_worker()
    for variable, package in driver.CHECKOUTS.items():
        spec = importlib.machinery.PathFinder.find_spec(package)
        assert spec is not None
        assert Path(str(spec.origin)).is_relative_to(homes[variable]), package


def test_a_configuration_may_use_mindspeeds_own_groups(tmp_path):
    write(tmp_path / "rl/configs/model/tiny.yaml", "tiny: {num_layers: 2}\n")
    defaults = "defaults:\n  - model:\n      - tiny\n  - _self_\n"
    path = write(tmp_path / "run.yaml", f"{defaults}rl_config: {{epochs: 1}}\n")
    config = compose_config(path, ["rl_config.epochs=2"], tmp_path / "rl")
    assert (config.model.tiny.num_layers, config.rl_config.epochs) == (2, 2)
    with pytest.raises(ConfigError, match=r"run.yaml: cannot be composed"):
        compose_config(path, ["rl_config.epocs=2"], tmp_path / "rl")
    with pytest.raises(ConfigError, match=r"missing\.yaml"):
        compose_config(tmp_path / "missing.yaml", [], tmp_path)


def test_check_writes_what_the_driver_reads(tmp_path):
    file = tmp_path / "mindspeed_rl.yaml"
    assert main(["check", "qwen25_7b_910b", "method=joint", "--output", str(tmp_path), "--write", str(file)]) == 0
    assert file.read_text().startswith("# MindSpeed-RL's configuration of the run qwen25_7b_910b")
    settings, config = driver.split_config(compose_config(file, [], tmp_path))
    assert (settings.method.name, settings.platform, settings.eval_interval) == ("joint", "npu", 50)
    assert config.actor_config.tensor_model_parallel_size == 4
    assert yaml.safe_load(file.read_text())["megatron_training"]["model"] in config.model


PROCESS = ProcessSettings(
    coca=CocaSettings(),
    mindspeed_rl_home=Path("/rl"),
    import_paths=(Path("/a"), Path("/b")),
    release="2.3.0",
    reference=False,
)


def test_every_ray_process_gets_the_settings(monkeypatch):
    runtime = driver.runtime_environment(PROCESS, {"HCCL_BUFFSIZE": ("256", "a file")})
    assert runtime["env_vars"]["HCCL_BUFFSIZE"] == "256"
    repository, *checkouts = runtime["env_vars"]["PYTHONPATH"].split(":")
    assert Path(repository, "tests/support/mindspeed_host").is_dir()  # reached by workers too
    assert checkouts[:2] == ["/a", "/b"]
    assert runtime["worker_process_setup_hook"] == "coca_mindspeed.mindspeed.start.process.setup_worker"
    monkeypatch.setenv(VARIABLE, runtime["env_vars"][VARIABLE])
    assert ProcessSettings.from_environment() == PROCESS
    monkeypatch.delenv(VARIABLE)
    with pytest.raises(ConfigError, match=VARIABLE):
        ProcessSettings.from_environment()


@pytest.mark.parametrize(("tracker", "advised"), [(None, False), ("release", False), ("4", True), ("", True)])
def test_a_run_is_resumed_only_from_a_checkpoint(tmp_path, tracker, advised):
    if tracker is not None:
        (tmp_path / "latest_checkpointed_iteration.txt").write_text(tracker)
    config = _config(actor_config={"save": str(tmp_path)})
    assert (str(tmp_path) in driver.resume_hint(config)) == advised


@pytest.mark.parametrize("address", [None, "auto"])
def test_ray_is_started_here_unless_a_cluster_is_named(monkeypatch, address):
    """Ray by itself would join another user's cluster on the same machine."""
    asked: dict[str, Any] = {}
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(init=lambda **arguments: asked.update(arguments)))
    services = SimpleNamespace(get_node=None, wait_for_node=lambda: None)
    monkeypatch.setitem(sys.modules, "ray._private.services", services)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    if address is not None:
        monkeypatch.setenv("RAY_ADDRESS", address)
    driver.start_ray(PROCESS, _config(), {})
    assert asked.get("address") == ("local" if address is None else None)


class _RayError(Exception):
    """Stands where Ray's would; a task's error shows the traceback of its process and carries its cause."""

    def __init__(self, text: str, cause: Exception) -> None:
        super().__init__(text)
        self.cause = cause


def test_a_node_that_cannot_start_its_processes_ends_the_start_with_its_cause(monkeypatch):
    ended = []
    errors = SimpleNamespace(RayError=_RayError, RayTaskError=_RayError)
    ray = SimpleNamespace(init=lambda **_: None, shutdown=lambda: ended.append(True), exceptions=errors)
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setenv("RAY_ADDRESS", "auto")

    def refuse(_planned: object) -> None:
        raise _RayError("ray::setup_worker()", ValueError("another release"))

    monkeypatch.setattr(driver, "check_weights_on_nodes", refuse)
    with pytest.raises(TrainingError, match="another release"):
        driver.start_ray(PROCESS, _config(), {})
    assert ended == [True]


@pytest.mark.parametrize(
    ("raised", "source", "shown"),
    [
        ("raise ValueError('too few')", "", "ValueError: too few"),
        ("assert 5 < 2", "", "AssertionError: {file}, line 3: assert 5 < 2"),
        ("raise KeyError", "  # no message", "KeyError: {file}, line 3: raise KeyError  # no message"),
    ],
)
def test_an_error_without_a_message_is_shown_by_its_source(tmp_path, homes, monkeypatch, raised, source, shown):
    """Megatron asserts without messages; the traceback may stand thousands of lines above the last one."""
    file = write(tmp_path / "worker.py", f"def initialize():\n    # in a worker\n    {raised}{source}\n")
    namespace: dict[str, Any] = {}
    exec(compile(file.read_text(), file, "exec"), namespace)  # noqa: S102 - the file is the test's own

    def get(_task: object) -> None:
        try:
            namespace["initialize"]()
        except Exception as error:  # noqa: BLE001 - as Ray does
            raise _RayError(f"ray::train()\n{traceback.format_exc()}", error) from None

    task = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=lambda *_: None))
    errors = SimpleNamespace(RayError=_RayError, RayTaskError=_RayError)
    ray = SimpleNamespace(get=get, remote=lambda _: task, shutdown=lambda: None, exceptions=errors)
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setattr(driver, "start_ray", lambda *_: None)
    monkeypatch.setattr(driver, "matching_manifest", lambda _root: SimpleNamespace(release="2.3.0"))
    write(homes["MINDSPEED_RL_HOME"] / "configs/envs/runtime_env.yaml", "env_vars: {}\n")
    training = driver.prepare(_config(), os.environ, {})
    with pytest.raises(TrainingError) as caught:
        driver.train(training)
    assert str(caught.value) == f"training ended: {shown.format(file=file)}"
