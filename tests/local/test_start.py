"""Starting a run: what cannot work is said before a model is loaded, and a start that fails leaves nothing behind."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file, save_file

from coca_mindspeed.cli import main
from coca_mindspeed.config.compose import compose_run
from coca_mindspeed.config.schema import ModelConfig
from coca_mindspeed.errors import ConfigError, DataError, MissingDependencyError
from coca_mindspeed.local.load import load_policy
from coca_mindspeed.local.model_files import read_model_config
from coca_mindspeed.local.policy import choose_device, resolve_dtype
from coca_mindspeed.local.run_directory import open_run_directory
from coca_mindspeed.local.validation import LengthLimits
from coca_mindspeed.utils.directories import MARKER
from tests.grading.sandbox_package import needs_sandbox
from tests.local.models_for_tests import check_model, set_config, write_random_model
from tests.local.runs_for_tests import QUESTIONS, arguments, names, refused, small_session, write_rows
from tests.local.test_validation import SYSTEM, records

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_random_model(tmp_path_factory.mktemp("models") / "model", "llama")


@pytest.mark.parametrize("kind", ["qwen3_next", "jamba", "lfm2", "recurrent_gemma", "falcon_h1", "mamba"])
def test_a_model_with_a_running_state_is_refused_before_its_weights_are_read(tmp_path, model, kind):
    directory = set_config(model, tmp_path / "model")
    own = {"full_attn_idxs": [0]} if kind == "lfm2" else {}
    (directory / "config.json").write_text(json.dumps({"model_type": kind, **own}))
    with pytest.raises(ConfigError, match=f"found {kind}"):
        check_model(directory, ModelConfig(), records(), SYSTEM, LengthLimits(64, 8))


@pytest.mark.parametrize(
    ("config", "found"),
    [
        (None, "cannot be loaded: .*No such file"),
        ("{}", "expected a model_type"),
        ("[]", "expected a model_type"),
        ("{", "cannot be loaded"),
    ],
)
def test_no_model_is_guessed_from_a_directorys_name(tmp_path, config, found):
    directory = tmp_path / "my_llama"
    directory.mkdir()
    if config is not None:
        (directory / "config.json").write_text(config)
    with pytest.raises(ConfigError, match=rf"model\.path=.*my_llama: .*{found}"):
        read_model_config(directory, ModelConfig())


def checks_of(command: list[str], code: int, functions: list[str]) -> list[str]:
    """Those of ``functions`` (``local.load.load_policy``) that a command calls, in the order of their first calls."""
    called: dict[str, None] = {}

    def note(frame, event, _):
        if event == "call":
            called.setdefault(f"{frame.f_globals.get('__name__')}.{frame.f_code.co_name}")

    sys.setprofile(note)
    try:
        assert main(command) == code
    finally:
        sys.setprofile(None)
    return [name for each in called if (name := each.removeprefix("coca_mindspeed.")) in functions]


def test_every_start_makes_the_checks_of_the_documented_list_in_its_order(tmp_path, model):
    page = (Path(__file__).parents[2] / "docs" / "architecture.md").read_text(encoding="utf-8")
    section = page.split("### The start of a local run")[1].split("\n### ")[0]
    rows = re.findall(r"^\| (.*?) \| `(\w+)` \| `([\w/]+)` \|$", section, re.MULTILINE)
    listed = [f"{module.replace('/', '.')}.{function}" for _, function, module in rows]
    of_resumed = [name for (title, *_), name in zip(rows, listed, strict=True) if "resumed" in title]
    new = [name for name in listed if name not in of_resumed]
    command = arguments(tmp_path, model)
    check = ["check", *command[1 : command.index("--output")], "evaluation.preflight=2"]
    assert checks_of(check, 1, listed) == [name for name in new if not name.endswith("open_run_directory")]
    assert checks_of([*command, "evaluation.preflight=2"], 1, listed) == new
    assert main(command) == 0
    resumed = [*command, "trainer.steps=2", "--resume"]
    assert checks_of(resumed, 0, listed) == [name for name in listed if not name.endswith("run_preflight")]


def test_a_first_step_that_fails_can_be_tried_again_with_other_settings(tmp_path, monkeypatch):
    def fails(*_):
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patched:
        patched.setattr("coca_mindspeed.local.train.update_policy", fails)
        session = small_session(tmp_path / "run", "trainer.steps=1", "warm_up.steps=1")
        with pytest.raises(RuntimeError):
            session.trainer.run()
    before = json.loads((tmp_path / "run" / MARKER).read_text())["id"]
    warm = (tmp_path / "run" / "warm_start" / "model.safetensors").stat()
    same = small_session(tmp_path / "run", "trainer.steps=1", "warm_up.steps=1")
    assert (tmp_path / "run" / "warm_start" / "model.safetensors").stat().st_ino == warm.st_ino
    assert same.trainer.run_id == before
    other = small_session(tmp_path / "run", "trainer.steps=1", "warm_up.steps=2", "rollout.prompts=4")
    assert (tmp_path / "run" / "warm_start" / "model.safetensors").stat().st_ino != warm.st_ino
    assert other.trainer.run_id != before
    other.trainer.run()
    with pytest.raises(ConfigError, match="already holds a run"):
        small_session(tmp_path / "run", "trainer.steps=1", "warm_up.steps=2", "rollout.prompts=4")


def test_an_output_that_is_something_else_is_refused_and_left_alone(tmp_path, model, capsys):
    for name in ("config.yaml", "metrics.jsonl", MARKER, "model"):
        (tmp_path / "run").mkdir(exist_ok=True)
        (tmp_path / "run" / name).write_text("{}")
        assert main(arguments(tmp_path, model)) == 1
        assert "[not-a-run]" in capsys.readouterr().err
        assert names(tmp_path / "run") == [name]
        (tmp_path / "run" / name).unlink()
    (tmp_path / "run" / "log.txt").write_text("a redirected log is no obstacle")
    assert main(arguments(tmp_path, model)) == 0
    (tmp_path / "file").write_text("")
    assert main([*arguments(tmp_path, model), "--output", str(tmp_path / "file")]) == 1


_HOLDS = """
import sys, time
from pathlib import Path
from coca_mindspeed.utils.directories import lock_run
with lock_run(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def test_two_processes_do_not_share_a_run(tmp_path, model, capsys):
    holder = [sys.executable, "-c", _HOLDS, str(tmp_path / "run")]
    with subprocess.Popen(holder, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"held\n"
        assert main(arguments(tmp_path, model)) == 1
        assert "another process" in capsys.readouterr().err
        assert names(tmp_path / "run") == [".lock"]
        process.kill()
        process.wait()
        assert main(arguments(tmp_path, model)) == 0


@pytest.mark.parametrize("there", ["", "run", "run/log.txt", "run/.lock"])
def test_a_start_that_writes_nothing_leaves_the_disk_as_it_was(tmp_path, there):
    file = tmp_path / there
    if there:
        (file if there == "run" else file.parent).mkdir()
    if "/" in there:
        file.touch()
    before = sorted(tmp_path.rglob("*"))
    output = tmp_path / "run" / "deep" / "er" if there == "" else tmp_path / "run"
    with open_run_directory(output, resume=False):
        assert (output / ".lock").exists()
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("package", "override"),
    [("peft", "model.lora.rank=4"), ("bitsandbytes", "optimizer.name=adamw_8bit"), ("wandb", "logging.wandb=mine")],
)
def test_without_an_optional_package_nothing_is_written(tmp_path, monkeypatch, capsys, package, override):
    monkeypatch.setitem(sys.modules, package, None)
    key = override.partition("=")[0]
    with pytest.raises(MissingDependencyError, match=rf"{key}.*: .* {package};") as refused:
        small_session(tmp_path / "run", override)
    assert main(["check", "demo", override]) == 1
    assert str(refused.value) in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("row", "grader", "message"),
    [
        ({"question": "long " * 3000}, "exact", r"heldout\.jsonl:6: .* its prompt has \d+ tokens"),
        pytest.param({"category": "code"}, "auto", r"record 'heldout-6'.*tests", marks=needs_sandbox),
        (None, "exact", r"data\.evaluate=.* holds no records"),
    ],
    ids=["long", "tests", "no records"],
)
def test_held_out_records_that_cannot_be_asked_or_graded_are_found_first(
    tmp_path, model, capsys, monkeypatch, row, grader, message
):
    """Those of training: tests/cli/test_refusals.py."""
    rows = [] if row is None else [*QUESTIONS[:5], {"question": "q", "answer": "1", **row}]
    write_rows(tmp_path / "heldout.jsonl", rows)
    found = refused(tmp_path, model, capsys, monkeypatch, f"data.grader={grader}")
    assert re.search(message, found), found


def test_the_tiny_model_refuses_what_it_cannot_read(tmp_path):
    for rows, message in (
        ([{"question": "What?", "answer": "1"}], "cannot read 'W' in its question"),
        ([{"question": "1+1", "answer": "x", "metadata": {"instruction": ""}}], "cannot read 'x' in its answer"),
        (
            [{"question": "1+1", "answer": "+", "metadata": {"instruction": "", "grader": "exact"}}],
            "needs an answer with a digit",
        ),
    ):
        path = write_rows(tmp_path / "own.jsonl", rows)
        with pytest.raises(DataError, match=message):
            small_session(tmp_path / "run", "data=records", f"data.train={path}", "evaluation.interval=0")
    with pytest.raises(ConfigError, match=r"rollout\.max_new_tokens=200: .*max_position_embeddings=128"):
        small_session(tmp_path / "run", "rollout.max_new_tokens=200")


def test_a_template_that_refuses_system_messages_says_what_to_do(tmp_path, model, capsys, monkeypatch):
    path = set_config(model, tmp_path / "gemma")
    template = "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}x"
    (path / "chat_template.jinja").write_text(template)
    message = refused(tmp_path, path, capsys, monkeypatch)
    assert "System role not supported" in message
    assert "docs/training.md" in message
    (path / "chat_template.jinja").write_text("{{ raise_exception('never') }}")
    assert ": never" in refused(tmp_path, path, capsys, monkeypatch)


def with_weights(model: Path, directory: Path, change) -> Path:
    path = set_config(model, directory)
    weights = load_file(path / "model.safetensors")
    change(weights)
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return path


NORM = "model.layers.1.input_layernorm.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.pop(NORM), rf"the checkpoint has no {NORM}$"),
        (lambda w: w.pop("lm_head.weight"), r"the checkpoint has no lm_head\.weight$"),
        (lambda w: w.update({"score.weight": torch.ones(1)}), r"more than the architecture: score\.weight$"),
        (lambda w: w.update({NORM: torch.ones(3)}), NORM),
        (lambda w: [w.pop(key) for key in list(w) if "layers.0" in key], r"and 6 more$"),
    ],
    ids=["missing", "head", "unexpected", "mismatched", "many"],
)
def test_a_model_with_random_weights_in_it_is_refused(tmp_path, model, change, message):
    path = with_weights(model, tmp_path / "broken", change)
    with pytest.raises(ConfigError, match=message) as caught:
        load_policy(path, ModelConfig(), CPU)
    assert str(caught.value).startswith(f"model.path={path}: ")


def test_the_configuration_knows_every_device_that_the_engine_knows():
    for name in ("auto", "cpu", "cuda", "cuda:3", "npu", "npu:7"):
        assert compose_run("demo", [f"trainer.device={name}"]).run.trainer.device == name
    with pytest.raises(ConfigError, match=r"trainer\.device"):
        compose_run("demo", ["trainer.device=tpu"])
    with pytest.raises(ConfigError, match=r"trainer\.device=npu: "):
        choose_device("npu")


@pytest.mark.parametrize(
    ("processor", "dtype"),
    [
        ({"avx512_bf16": False, "amx_bf16": False}, "float32"),
        ({}, "float32"),
        ({"avx512_bf16": True, "amx_bf16": False}, "bfloat16"),
        ({"avx512_bf16": False, "amx_bf16": True}, "bfloat16"),
    ],
)
def test_auto_is_bfloat16_where_the_processor_has_it(processor, dtype, monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: processor, raising=False)
    assert resolve_dtype(ModelConfig(compute_dtype="auto"), CPU) == dtype
    assert resolve_dtype(ModelConfig(compute_dtype="bfloat16"), CPU) == "bfloat16"
    assert resolve_dtype(ModelConfig(compute_dtype="float32"), CPU) == "float32"
    assert resolve_dtype(ModelConfig(compute_dtype="auto", attention="flash_attention_2"), CPU) == "bfloat16"
    for supported, expected in ((True, "bfloat16"), (False, "float32")):
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation, s=supported: s)
        assert resolve_dtype(ModelConfig(compute_dtype="auto"), torch.device("cuda")) == expected


def test_a_resumed_run_keeps_the_compute_dtype_of_its_first_machine(tmp_path, monkeypatch):
    keys = ("model.compute_dtype=auto", "warm_up.steps=1", "trainer.steps=2")
    for resume, features in ((False, {}), (True, {"avx512_bf16": True})):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda found=features: found, raising=False)
        session = small_session(tmp_path / "run", *keys, resume=resume)
        session.trainer.run(session.resume_from)
        session.close()
        assert session.run.config.model.compute_dtype == "float32"
        saved = compose_run(str(tmp_path / "run" / "config.yaml")).run
        assert saved.model.compute_dtype == "float32"
    session = small_session(tmp_path / "new", *keys)
    session.close()
    assert session.run.config.model.compute_dtype == "bfloat16"


def test_flash_attention_is_refused_by_its_key_where_it_cannot_be_had(tmp_path):
    path = write_random_model(tmp_path / "model", "llama")
    config = ModelConfig(attention="flash_attention_2", compute_dtype="bfloat16")
    with pytest.raises(ConfigError, match=r"model\.attention=flash_attention_2: .*flash-attn"):
        load_policy(path, config, torch.device("cpu"))
    with pytest.raises(ValidationError, match="takes no float32"):
        ModelConfig(attention="flash_attention_2", compute_dtype="float32")
