"""Starts of the local engine: how each row of ``starts.tsv`` ends, the order of the checks, and what a start leaves.

A row has five columns; several changes or results are separated by ``; ``:

- the exit code
- the stage that it ends in: ``files`` (without torch), ``device`` (also packages, prompts and memory), ``weights`` or
  ``samples``
- the command: ``TRAIN``, ``CHECK`` and ``BASELINE`` stand for ones that work in the directory of the fixture ``place``
- the changes: ``FILE = TEXT``, ``FILE -``, ``FILE + LINE``, ``FILE + OBJECT`` and ``FILE - KEY`` of a JSON object,
  ``FILE + NAME`` and ``FILE - PATTERN`` of tensors; ``disk BYTES`` and ``memory BYTES`` that are free,
  ``without PACKAGE``; ``transformers 4`` if the row is only about that release
- the results: ``code|key|value`` of each problem, all of them in their order, and words that are shown

No row may write anything.
"""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers

from coca_mindspeed import __version__
from coca_mindspeed.cli import main
from coca_mindspeed.config.compose import compose_run, to_yaml
from coca_mindspeed.config.schema import ModelConfig, TrainerConfig
from coca_mindspeed.errors import ConfigError
from coca_mindspeed.local.policy import resolve_dtype
from coca_mindspeed.local.run_directory import open_run_directory
from coca_mindspeed.utils.directories import MARKER, write_marker
from tests.local.models_for_tests import write_random_model
from tests.local.runs_for_tests import HELD_OUT, QUESTIONS, arguments, own_run, small_session, write_rows
from tests.local.starts_for_tests import AND, Started, start
from tests.tables import check_rows, read_table

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
STARTS = read_table(__file__, "starts.tsv")
OWN = own_run(Path(), Path("llama"))
WORDS = {
    "TRAIN": ["train", *OWN, "--quiet", "--output", "new/run"],
    "CHECK": ["check", *OWN],
    "BASELINE": ["baseline", "verbalised", "--model", "llama", "--max-new-tokens", "8", "--output", "new/run"],
}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A model, records that can be trained on, and directories that are taken."""
    place = tmp_path_factory.mktemp("place")
    write_random_model(place / "llama", "llama")
    for name, rows in (("train", QUESTIONS), ("heldout", HELD_OUT)):
        write_rows(place / f"{name}.jsonl", [{"id": str(number), **row} for number, row in enumerate(rows)])
    write_marker(place / "exported", "model")
    write_marker(place / "taken", "run", {"id": "0", "version": __version__})
    (place / "taken" / "config.yaml").write_text(to_yaml(compose_run("demo").run))
    (place / "taken" / "metrics.jsonl").write_text('{"step": 1}\n')
    return place


def typed(line: str) -> list[str]:
    return [argument for word in shlex.split(line) for argument in WORDS.get(word, [word])]


def check_start(started: Started, code: str, stage: str, line: str, _: str, expected: str) -> None:
    """Compare a start with its row: exit code, last stage, problems and words; it must have written nothing."""
    assert (started.code, started.stage, started.changed) == (int(code), stage, False), started.shown
    shown = expected.split(AND)
    problems = [each for each in shown if "|" in each]
    assert started.problems == problems, started.shown
    assert [each for each in shown if each not in problems and each not in started.shown] == [], started.shown
    if typed(line)[0] == "check":
        count = len(problems) or 1
        verdict = f"{count} problem{'s' * (count > 1)}" if started.code else "OK"
        assert started.shown.splitlines()[-1] == verdict


def test_starts_that_end_without_torch(place):
    rows = [row for row in STARTS if row[1] == "files"]
    starts = json.dumps([(typed(line), changes) for _, _, line, changes, _ in rows])
    variables = {"PYTHONPATH": str(ROOT), "PATH": os.environ["PATH"], "HF_ENDPOINT": "http://127.0.0.1:9"}  # no hub
    command = [sys.executable, "-m", "tests.local.starts_for_tests"]
    done = subprocess.run(
        command, input=starts, cwd=place, env=variables, stdout=subprocess.PIPE, text=True, check=True
    )
    found = [Started(*each) for each in json.loads(done.stdout)]
    check_rows(check_start, [(started, *row) for started, row in zip(found, rows, strict=True)])


@pytest.mark.parametrize(("code", "stage", "line", "changes", "expected"), [row for row in STARTS if row[1] != "files"])
def test_starts_that_end_with_torch(place, code, stage, line, changes, expected):
    if changes.startswith("transformers 4") and not transformers.__version__.startswith("4."):
        pytest.skip("transformers 5 reads and saves it")
    check_start(start(place, typed(line), changes), code, stage, line, changes, expected)


@pytest.fixture
def model(place):
    return place / "llama"


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
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
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


_HOLDS = """
import signal, sys
from pathlib import Path
from coca_mindspeed.utils.directories import lock_run
with lock_run(Path(sys.argv[1])):
    print("held", flush=True)
    signal.pause()
"""


def test_two_processes_do_not_share_a_run(tmp_path, model, capsys):
    holder = [sys.executable, "-c", _HOLDS, str(tmp_path / "run")]
    with subprocess.Popen(holder, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"held\n"
        assert main(arguments(tmp_path, model)) == 1
        assert "another process" in capsys.readouterr().err
        assert [path.name for path in (tmp_path / "run").iterdir()] == [".lock"]
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


def test_the_configuration_knows_every_device_that_the_engine_knows():
    for name in ("auto", "cpu", "cuda", "cuda:3", "npu", "npu:7"):
        assert TrainerConfig(device=name).device == name


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
