"""The driver refuses bad configurations before Ray starts, and passes the rest to MindSpeed-RL."""

import copy
import importlib.machinery
import json
import shutil
import sys
import traceback
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf

from coca_mindspeed.errors import ConfigError, GradingError, MissingDependencyError, TrainingError
from coca_mindspeed.mindspeed.start import driver, process
from coca_mindspeed.mindspeed.start.process import VARIABLE, CocaSettings, ProcessSettings
from tests.mindspeed.builders import checkpoint, write
from tests.mindspeed.builders import mindspeed_config as _config
from tests.tokenizers_for_tests import QWEN_TEMPLATE, qwen_like


def test_a_missing_shim_or_its_vllm_is_reported_before_ray_starts(monkeypatch):
    host = CocaSettings(platform="host")
    process.check_cpu_shim(_process(cpu_shim=None))  # on NPUs there is none
    process.check_cpu_shim(_process(coca=host))
    for shim in (None, "tests.support.no_such_shim"):
        with pytest.raises(MissingDependencyError, match=r"coca\.platform"):
            process.check_cpu_shim(_process(coca=host, cpu_shim=shim))
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    with pytest.raises(MissingDependencyError, match=r"mindspeed-vllm.sh DIRECTORY 0\.11\.0"):
        process.check_cpu_shim(_process(coca=CocaSettings(platform="host", rollout="vllm"), release="master"))


def test_checkouts_are_looked_for_in_the_environment(tmp_path, homes):
    environment = {variable: str(path) for variable, path in homes.items()}
    assert driver.find_checkouts(environment) == homes
    with pytest.raises(MissingDependencyError, match=r"^MINDSPEED_HOME: .*\n    git clone .*\n.*ascend.md.*$"):
        driver.find_checkouts({**environment, "MINDSPEED_HOME": ""})
    with pytest.raises(MissingDependencyError, match=r"^MEGATRON_HOME=/.* megatron/"):
        driver.find_checkouts({**environment, "MEGATRON_HOME": str(tmp_path)})


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
    config = driver.compose_config(path, ["rl_config.epochs=2"], tmp_path / "rl")
    assert (config.model.tiny.num_layers, config.rl_config.epochs) == (2, 2)
    with pytest.raises(ConfigError, match=r"run.yaml: cannot be composed"):
        driver.compose_config(path, ["rl_config.epocs=2"], tmp_path / "rl")
    with pytest.raises(ConfigError, match=r"missing\.yaml"):
        driver.compose_config(tmp_path / "missing.yaml", [], tmp_path)


def _process(**fields: Any) -> ProcessSettings:
    return ProcessSettings(
        coca=fields.pop("coca", CocaSettings()),
        mindspeed_rl_home=fields.pop("home", Path("/rl")),
        import_paths=(Path("/a"), Path("/b")),
        release=fields.pop("release", "2.3.0"),
        reference=False,
        cpu_shim=fields.pop("cpu_shim", "tests.support.mindspeed_host"),
    )


NAMES = ("HCCL_EXEC_TIMEOUT", "HCCL_BUFFSIZE", "VLLM_ASCEND_ENABLE_TOPK_OPTIMIZE", "VLLM_DP_SIZE")
NOTHING_CUT = {"generate_config": {"sampling_config": {"top_k": -1, "top_p": 1.0}}}
GRAPHS = {"generate_config": {"enforce_eager": False}}
EXPERTS = {"generate_config": {"enable_expert_parallel": True, "infer_expert_parallel_size": 4}}
BUFFER = {"rl_config": {"hccl_buffersize": 64}}
TOPK, QUEUE, NZ = "VLLM_ASCEND_ENABLE_TOPK_OPTIMIZE", "TASK_QUEUE_ENABLE", "VLLM_ASCEND_ENABLE_NZ"


@pytest.mark.parametrize(
    ("release", "changes", "exported", "expected"),
    [
        ("2.3.0", {}, {}, {}),
        ("2.3.0", {}, {"HCCL_EXEC_TIMEOUT": "7200"}, {"HCCL_EXEC_TIMEOUT": "7200"}),
        ("2.3.0", BUFFER, {}, {"HCCL_BUFFSIZE": "64"}),
        ("2.3.0", BUFFER, {"HCCL_BUFFSIZE": "32"}, {"HCCL_BUFFSIZE": "32"}),
        ("2.3.0", EXPERTS, {}, {"VLLM_DP_SIZE": "4"}),
        # No vocabulary is sorted where nothing is cut; MindSpeed-RL's default is the 50 most likely.
        ("2.3.0", NOTHING_CUT, {}, {TOPK: "0"}),
        ("2.3.0", NOTHING_CUT, {TOPK: "2"}, {TOPK: "2"}),
        ("2.3.0", {"generate_config": {"sampling_config": {"top_k": -1, "top_p": 0.9}}}, {}, {}),
        ("master", NOTHING_CUT, {}, {}),  # whose vLLM-Ascend does not read it
        # MindSpeed-RL's file says 2, its page on graph mode 1.
        ("master", GRAPHS, {}, {QUEUE: "1"}),
        ("2.3.0", GRAPHS, {QUEUE: "1"}, {QUEUE: "1"}),
        ("2.3.0", GRAPHS, {QUEUE: "2"}, ("task-queue", QUEUE, "2")),
        # vLLM-Ascend would roll out with stale weights.
        ("2.3.0", {}, {NZ: "0"}, {}),
        ("2.3.0", {}, {NZ: "1"}, ("weight-format", NZ, "1")),
        ("master", {}, {NZ: "2"}, ("weight-format", NZ, "2")),
    ],
)
def test_variables_of_rays_workers(tmp_path, release, changes, exported, expected):
    shipped = dict.fromkeys(NAMES, "1") | {QUEUE: "2"}
    write(tmp_path / "configs/envs/runtime_env.yaml", yaml.safe_dump({"env_vars": shipped}))
    settings, config = _process(home=tmp_path, release=release), _config(**changes)
    if isinstance(expected, tuple):
        with pytest.raises(ConfigError) as refused:
            driver.worker_variables(settings, config, exported)
        assert [(p.code, p.key, p.value) for p in refused.value.problems] == [expected]
        return
    found = {name: value for name, (value, _) in driver.worker_variables(settings, config, exported).items()}
    assert found.pop(NZ) == "0"
    assert {name: value for name, value in found.items() if value != shipped[name]} == expected


def test_every_ray_process_gets_the_settings(tmp_path, monkeypatch):
    process = _process(home=tmp_path)
    runtime = driver.runtime_environment(process, {"HCCL_BUFFSIZE": ("256", "a file")})
    assert runtime["env_vars"]["HCCL_BUFFSIZE"] == "256"
    repository, *checkouts = runtime["env_vars"]["PYTHONPATH"].split(":")
    assert Path(repository, "tests/support/mindspeed_host").is_dir()  # reached by workers too
    assert checkouts[:2] == ["/a", "/b"]
    assert runtime["worker_process_setup_hook"] == "coca_mindspeed.mindspeed.start.process.setup_worker"
    monkeypatch.setenv(VARIABLE, runtime["env_vars"][VARIABLE])
    assert ProcessSettings.from_environment() == process
    monkeypatch.delenv(VARIABLE)
    with pytest.raises(ConfigError, match=VARIABLE):
        ProcessSettings.from_environment()


@pytest.fixture
def driven(tmp_path, homes, monkeypatch, capsys):
    """Run the driver on one record with a grader: its message, and whether it came to the start of Ray."""
    monkeypatch.setattr(driver, "matching_manifest", lambda _root: SimpleNamespace(release="2.3.0"))
    monkeypatch.setattr(driver, "shipped_keys", lambda *_release: SimpleNamespace(problems=lambda _config: []))
    monkeypatch.setitem(sys.modules, "ray", ModuleType("ray"))
    write(homes["MINDSPEED_RL_HOME"] / "configs/envs/runtime_env.yaml", "env_vars: {}\n")

    def start_ray(*_arguments: Any):
        raise GradingError("Ray was started")

    monkeypatch.setattr(driver, "start_ray", start_ray)
    monkeypatch.setattr("coca_sandbox.sandbox.shutil.which", lambda _name: None)
    records, path = tmp_path / "train.jsonl", tmp_path / "run.yaml"
    data = {"data_path": str(records), "dataset_additional_keys": ["coca_record"]}

    def drive(record, grader, tokenizer: Path | None = None, **coca) -> tuple[str, bool]:
        records.write_text(json.dumps({"id": "0", "dataset": "d", "question": "q", **record}) + "\n")
        training = data | ({} if tokenizer is None else {"tokenizer_name_or_path": str(tokenizer)})
        path.write_text(OmegaConf.to_yaml(_config(coca={"grader": grader, **coca}, megatron_training=training)))
        assert driver.main([str(path)]) == 1
        message = capsys.readouterr().err
        return message, "Ray was started" in message

    return drive


_PROGRAM = {"category": "code", "answer": "", "metadata": {"tests": {"kind": "asserts", "code": "assert f(1) == 1"}}}


_MATHS, _EMPTY = ({"category": "math", "answer": answer} for answer in ("1", " "))
_CLOCK = "{{ strftime_now('%Y') }}" + QWEN_TEMPLATE
_THINKING = QWEN_TEMPLATE + "{% if add_generation_prompt and thinking != 'off' %}<think>{% endif %}"


@pytest.mark.parametrize(
    ("record", "grader", "problem"),
    [(_PROGRAM, "code", "bwrap"), (_MATHS, "auto", None), (_EMPTY, "auto", "record '0' of 'd'")],
)
def test_records_that_cannot_be_graded_stop_the_run_before_ray_starts(driven, record, grader, problem):
    message, started = driven(record, grader)
    assert started == (problem is None)
    assert problem is None or problem in " ".join(message.split())


PLAIN, LLAMA = "{% for m in messages %}{{ m.content }}\n{% endfor %}", {"eos_token": "<|endoftext|>"}


@pytest.mark.parametrize(
    ("template", "tokens", "coca", "key"),
    [
        (QWEN_TEMPLATE, {}, {}, None),
        (_THINKING, {}, {}, "model.allow_open_thinking"),
        (_THINKING, {}, {"chat_template_kwargs": {"thinking": "off"}}, None),
        (_CLOCK, {}, {}, "model.prompt_date"),
        (_CLOCK, {}, {"prompt_date": "2024-07-05"}, None),
        (None, {}, {}, "no chat template"),
        # The end of text ends a turn of the chat, unless turns are plain text.
        (QWEN_TEMPLATE, LLAMA, {}, "eos_token"),  # as Llama 3 was first published
        (QWEN_TEMPLATE + "{{ eos_token }}", LLAMA, {}, None),
        (PLAIN, LLAMA, {}, None),
        (PLAIN, {**LLAMA, "pad_token": "m"}, {}, None),
    ],
)
def test_prompts_that_cannot_be_trained_on_stop_the_run_early(driven, tmp_path, template, tokens, coca, key):
    tokenizer = copy.deepcopy(qwen_like())
    tokenizer.chat_template = template
    for name, token in tokens.items():
        setattr(tokenizer, name, token)
    tokenizer.save_pretrained(tmp_path / "model")
    message, started = driven(_MATHS, "exact", tmp_path / "model", **coca)
    assert started == (key is None)
    assert key is None or key in message


def test_another_model_in_config_json_stops_the_run_early(driven, tmp_path):
    write(tmp_path / "model/config.json", json.dumps({"model_type": "mistral"}))
    message, started = driven(_MATHS, "exact", tmp_path / "model")
    assert not started
    assert message.startswith("coca-mindspeed: config.json: model_type=")


@pytest.mark.parametrize(("tracker", "advised"), [(None, False), ("release", False), ("4", True), ("", True)])
def test_a_run_is_resumed_only_from_a_checkpoint(tmp_path, tracker, advised):
    if tracker is not None:
        (tmp_path / "latest_checkpointed_iteration.txt").write_text(tracker)
    config = _config(actor_config={"save": str(tmp_path)})
    assert (str(tmp_path) in driver.resume_hint(config)) == advised


@pytest.mark.parametrize(
    ("gaps", "wrong"),
    [
        ([0.004, 0.006], None),
        ([driver.LARGEST_LOG_PROB_GAP], None),
        ([0.004, 0.13], 2),  # say stale weights
        ([0.13, 0.004], 1),
        ([None], 1),  # NaN
        ([], None),  # at another temperature it is not measured
    ],
)
def test_a_trial_fails_if_the_rollout_has_another_model(tmp_path, capsys, gaps, wrong):
    rows = [{"step": i, "rollout/log_prob_gap": gap} for i, gap in enumerate(gaps, start=1)] or [{"step": 1}]
    write(tmp_path / "metrics.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    if wrong is None:
        driver.check_trial(tmp_path)
        assert "log_prob_gap" in capsys.readouterr().out
    else:
        with pytest.raises(TrainingError, match=f"metrics.jsonl: rollout/log_prob_gap=.* iteration {wrong},"):
            driver.check_trial(tmp_path)


REFERENCE = {"rl_config": {"integrated_mode_config": {"ref_model_load_path": "weights"}}}


@pytest.mark.parametrize(
    "named", [{"actor_config": {"load": "weights"}}, {"ref_config": {"load": "weights"}}, REFERENCE]
)
def test_weights_that_are_not_there_are_missed_here(tmp_path, monkeypatch, named):
    """Megatron says so in its log and goes on from random ones."""
    monkeypatch.chdir(tmp_path)
    Path("weights").mkdir()
    config = _config(**named)
    with pytest.raises(ConfigError, match=r"(load|ref_model_load_path): "):
        driver.check_weights(config, reference=True)
    if "actor_config" not in named:  # where there is no KL term it is not read
        driver.check_weights(config, reference=False)
    # Split by tensor parallelism, by expert, or in Megatron's distributed form.
    for inside in ("mp_rank_00/model_optim_rng.pt", "mp_rank_01_001_003/model_optim_rng.pt", "__0_0.distcp"):
        shutil.rmtree("weights")
        write("weights/latest_checkpointed_iteration.txt", "12")
        with pytest.raises(ConfigError, match=r"(load|ref_model_load_path): .*iter_0000012"):
            driver.check_weights(config, reference=True)
        write(f"weights/iter_0000012/{inside}")
        driver.check_weights(config, reference=True)


def test_a_training_goes_on_from_a_checkpoint_of_one(tmp_path):
    load = str(checkpoint(tmp_path / "converted", 2))
    resumed = {"load": load, "finetune": False, "no_load_optim": False}
    with pytest.raises(ConfigError, match=r"actor_config\.no_load_optim"):
        driver.check_weights(_config(actor_config=resumed), reference=True)
    # As MindSpeed-RL's own examples begin: Megatron takes converted weights as new ones whatever finetune says.
    for begun in ({"finetune": True}, {"finetune": False}, {"finetune": False, "no_load_optim": True}):
        driver.check_weights(_config(actor_config={"load": load, **begun}), reference=True)
    checkpoint(tmp_path / "converted", 2, iteration="7")
    driver.check_weights(_config(actor_config=resumed), reference=True)
    driver.check_weights(_config(), reference=True)


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
    driver.start_ray(_process(), _config(), {})
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

    monkeypatch.setattr(driver, "check_files_on_nodes", refuse)
    with pytest.raises(TrainingError, match="another release"):
        driver.start_ray(_process(), _config(), {})
    assert ended == [True]


@pytest.mark.parametrize(
    ("raised", "source", "shown"),
    [
        ("raise ValueError('too few')", "", "ValueError: too few"),
        ("assert 5 < 2", "", "AssertionError: {file}, line 3: assert 5 < 2"),
        ("raise KeyError", "  # no message", "KeyError: {file}, line 3: raise KeyError  # no message"),
    ],
)
def test_an_error_without_a_message_is_shown_by_its_source(driven, tmp_path, monkeypatch, raised, source, shown):
    """Megatron asserts without messages; the traceback may stand thousands of lines above the last one."""
    file = write(tmp_path / "worker.py", f"def initialize():\n    # in a worker\n    {raised}{source}\n")
    namespace: dict[str, Any] = {}
    exec(compile(file.read_text(), file, "exec"), namespace)  # noqa: S102 - the file is the test's own

    def get(_task: object) -> None:
        try:
            namespace["initialize"]()
        except Exception as error:  # noqa: BLE001 - as Ray does
            raise _RayError(f"ray::train()\n{traceback.format_exc()}", error) from None

    task = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=lambda _config: None))
    errors = SimpleNamespace(RayError=_RayError, RayTaskError=_RayError)
    ray = SimpleNamespace(get=get, remote=lambda _: task, shutdown=lambda: None, exceptions=errors)
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setattr(driver, "start_ray", lambda *_: None)
    message, _ = driven(_MATHS, "exact")
    assert message.rstrip().endswith(f"training ended: {shown.format(file=file)}")
