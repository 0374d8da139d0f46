"""Starts of MindSpeed-RL runs: what is refused, by code and key, and what an accepted start sets (``starts.tsv``).

A row has three columns: what lies in the working directory, the command, and its results. Words are separated by
spaces, results by ``; ``. A result is ``code|key|value`` of a problem, all of which are listed, or ``|key|value`` of an
accepted start, at least one, as far as the row is about it. Values are JSON; absolute paths in the working directory
begin with ``./``. An error without a code has its class for one, and its "value" is a key or name that the message
holds.

The commands, behind environment variables as in a shell, and the keys of their results:

- ``layout FIELD=VALUE ...``: the layout's checks of ``ResolvedConfig``; its fields and properties, and those of its
  ``Layout``
- ``check [RUN] [OVERRIDE ...]``: the plan, by ``metrics.jsonl`` if it is there, and the run that has begun; A., G., R.
  and T. stand for sections below ``mindspeed_rl``; keys of the written file, ``plan.ROW`` and ``iterations``
- ``launch [--resume] [--stage N] [OVERRIDE ...]``: values of the last of the stages that are to do, or of stage N, and
  the ``stages``
- ``native [KEY=VALUE ...]``: the plan of a file in MindSpeed-RL's layout (``builders.NATIVE``), and what it writes
- ``driver [KEY=VALUE ...]``: the driver's checks of MindSpeed-RL's configuration before it starts Ray; keys of the
  configuration, ``process.SETTING``, variables of Ray's workers, and the files whose ``prompts`` were checked

``_set_up`` lists the words of the first column.
"""

import contextlib
import copy
import functools
import inspect
import io
import itertools
import json
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf

from coca_mindspeed.config.compose import compose_run
from coca_mindspeed.errors import CocaError, ConfigError, raise_problems
from coca_mindspeed.mindspeed.cluster_run import ClusterRun
from coca_mindspeed.mindspeed.keys import put
from coca_mindspeed.mindspeed.layout import layout_problems
from coca_mindspeed.mindspeed.native import compose_cluster_run
from coca_mindspeed.mindspeed.plan import make_plan
from coca_mindspeed.mindspeed.start import driver
from coca_mindspeed.mindspeed.start.process import CPU_SHIM
from coca_mindspeed.mindspeed.start.records import read_record_file
from coca_mindspeed.mindspeed.start.run_file import (
    StageFiles,
    check_begun_run,
    mindspeed_values,
    stage_marker,
    stages_to_do,
    write_run_file,
)
from coca_mindspeed.mindspeed.start.verifiers import check_gold_answers
from coca_mindspeed.utils.directories import MARKER
from coca_mindspeed.utils.json_files import read_object, write_json
from coca_mindspeed.utils.text_formats import value_of
from tests.mindspeed.builders import NATIVE, checkpoint, mindspeed_config, write
from tests.tables import check_rows, read_table
from tests.tokenizers_for_tests import QWEN_TEMPLATE, THINKING_TEMPLATE, qwen_like

RUN = "qwen25_7b_910b"
OUTPUT, METRICS = Path("run"), Path("metrics.jsonl")
SHORT = {
    **{"A.": "mindspeed_rl.actor_config.", "G.": "mindspeed_rl.generate_config."},
    **{"R.": "mindspeed_rl.rl_config.", "T.": "mindspeed_rl.megatron_training."},
}
MATHS = {"id": "0", "dataset": "d", "question": "q", "category": "math", "answer": "1"}
RECORDS = {
    "maths": MATHS,
    "blank": {**MATHS, "answer": " "},
    "program": {**MATHS, "category": "code", "metadata": {"tests": {"kind": "asserts", "code": "assert f(1) == 1"}}},
}
_LLAMA = {"eos_token": "<|endoftext|>"}  # as Llama 3 was first published: not the token that ends a turn
_PLAIN = "{% for m in messages %}{{ m.content }}\n{% endfor %}"  # nothing ends a turn
TOKENIZERS: dict[str, tuple[str | None, dict[str, str]]] = {
    "chat": (QWEN_TEMPLATE, {}),
    "thinking": (THINKING_TEMPLATE, {}),
    "clock": ("{{ strftime_now('%Y') }}" + QWEN_TEMPLATE, {}),
    "no_template": (None, {}),
    "another_end": (QWEN_TEMPLATE, _LLAMA),
    "named_end": (QWEN_TEMPLATE + "{{ eos_token }}", _LLAMA),
    "plain": (_PLAIN, _LLAMA),
    "plain_padded": (_PLAIN, {**_LLAMA, "pad_token": "m"}),
}
DATA = {"data_path": "train.jsonl", "dataset_additional_keys": ["coca_record"]}
#: Variables of MindSpeed-RL's ``runtime_env.yaml``.
SHIPPED = {
    **dict.fromkeys(("HCCL_EXEC_TIMEOUT", "HCCL_BUFFSIZE", "VLLM_ASCEND_ENABLE_TOPK_OPTIMIZE", "VLLM_DP_SIZE"), "1"),
    "TASK_QUEUE_ENABLE": "2",
}
ROWS = read_table(__file__, "starts.tsv")


def _full(text: str) -> str:
    return SHORT.get(text[:2], text[:2]) + text[2:]


@functools.cache
def _composed(name: str, *overrides: str):
    return compose_run(name, [_full(override) for override in overrides]).run


def _values(start: ClusterRun) -> dict[str, Any]:
    return mindspeed_values(start, start.iterations or 1, StageFiles(OUTPUT))


def _write_run(directory: Path, name: str, overrides: list[str]) -> None:
    run = _composed(name, *overrides)
    stage_marker(_values(make_plan(run).start)).write(directory, resumed=False)


def _set_up(word: str, patch: pytest.MonkeyPatch) -> None:
    r"""Make what a word of the first column names.

    - ``FILE=TEXT``, where ``\n`` ends a line; ``DIR/``; ``DIR@ITERATION``: checkpoints of four ranks
    - ``begun:OVERRIDE,...``: the marker of a run whose first stage was started; ``stored:KEY=VALUE`` changes it and
      ``stored:~KEY`` removes a key, as in another release; ``earlier:OVERRIDE,...``: the file of a release before 0.4
    - ``metrics:RUN,OVERRIDE,...``: metrics with the file of their run
    - ``record:NAME`` (``RECORDS``), ``tokenizer:NAME`` (``TOKENIZERS``)
    - ``release:NAME`` of MindSpeed-RL; ``without:vllm``, ``without:bwrap``
    """
    if file := re.fullmatch(r"([\w./-]+)=(.*)", word):
        write(file[1], file[2].replace("\\n", "\n"))
        return
    if word.endswith("/"):
        Path(word).mkdir(parents=True)
        return
    if "@" in word:
        directory, iteration = word.split("@")
        checkpoint(Path(directory), 4, iteration=iteration)
        return
    begun = StageFiles(OUTPUT).results
    match word.split(":", 1):
        case "begun", overrides:
            _write_run(begun, RUN, [*filter(None, overrides.split(","))])
        case "earlier", overrides:
            run = _composed(RUN, *filter(None, overrides.split(",")))
            write_run_file(write(begun / "mindspeed_rl.yaml"), _values(make_plan(run).start), RUN)
        case "stored", change:
            marker = read_object(begun / MARKER)
            values, (key, _, value) = marker["settings"], change.lstrip("~").partition("=")
            if change.startswith("~"):
                section, _, last = key.rpartition(".")
                del value_of(values, section)[last]
            else:
                put(values, key, yaml.safe_load(value))
            write_json(begun / MARKER, marker)
        case "metrics", text:
            row = {"step": 1, "prompt_length/mean": 100, "response_length/mean": 300, "e2e_tps": 80}
            write(METRICS, json.dumps(row) + "\n")
            name, *overrides = text.split(",")
            _write_run(Path(), name, overrides)
        case "record", name:
            write("train.jsonl", json.dumps(RECORDS[name]) + "\n")
        case "tokenizer", name:
            tokenizer = copy.deepcopy(qwen_like())
            tokenizer.chat_template, tokens = TOKENIZERS[name]
            for attribute, token in tokens.items():
                setattr(tokenizer, attribute, token)
            tokenizer.save_pretrained("model")
        case "release", name:
            patch.setattr(driver, "matching_manifest", lambda _root: SimpleNamespace(release=name))
        case "without", "vllm":
            patch.setitem(sys.modules, "vllm", None)
        case "without", "bwrap":
            patch.setattr("coca_sandbox.sandbox.shutil.which", lambda _name: None)
        case _:
            raise ValueError(word)


def _layout(changes: list[str]) -> Mapping[str, Any]:
    resolved = ClusterRun(_composed(RUN)).resolved
    values: Any = OmegaConf.to_container(OmegaConf.from_dotlist(changes))
    changed = resolved.model_copy(update=values)
    raise_problems(layout_problems(changed))

    def derived(each: object) -> list[str]:
        return [name for name, _ in inspect.getmembers(type(each), lambda member: isinstance(member, property))]

    return changed.model_dump() | {
        name: getattr(each, name) for each in (changed, changed.layout) for name in derived(each)
    }


def _check(words: list[str]) -> Mapping[str, Any]:
    name = words.pop(0) if words and "=" not in words[0] else RUN
    run = _composed(name, *words)
    plan = make_plan(run, metrics=METRICS if METRICS.exists() else None)
    raise_problems(plan.problems)
    if plan.iterations is not None:
        check_begun_run(plan.start, OUTPUT)
    check_gold_answers(plan.start, os.environ)
    return {**_values(plan.start), "plan": dict(plan.rows), "iterations": plan.iterations}


def _launch(words: list[str]) -> Mapping[str, Any]:
    resume, one = "--resume" in words, "--stage" in words
    stage = int(words[words.index("--stage") + 1]) if one else 0
    run = _composed(RUN, *(word for word in words if "=" in word))
    start = make_plan(run).start
    stages = [(stage, resume)] if one else stages_to_do(start, OUTPUT, resume=resume)
    values = [
        mindspeed_values(start, start.iterations, StageFiles(OUTPUT, stage), resume=resumed)
        for stage, resumed in stages
    ]
    return {**(values[-1] if values else {}), "stages": stages}


def _drive(changes: list[str]) -> Mapping[str, Any]:
    base = mindspeed_config(megatron_training={"tokenizer_name_or_path": "model", **DATA})
    config: Any = OmegaConf.to_container(OmegaConf.merge(base, OmegaConf.from_dotlist(changes)))
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        data = Path(DATA["data_path"])
        files = {str(data): read_record_file(data)} if data.is_file() else {}
        training = driver.prepare(config, os.environ, files)
    process, sections = training.process, OmegaConf.to_container(training.config)
    coca = {**process.coca.model_dump(mode="json"), "rollout_engine": process.coca.rollout_engine}
    return {
        **sections,
        **{name: value for name, (value, _) in training.variables.items()},
        "coca": coca,
        "process": process.model_dump(mode="json", exclude={"coca"}),
        "files": {path: file.sha256 for path, file in training.files.items()},
        "prompts": re.findall(r"checking the prompts of (.+)", printed.getvalue()),
    }


def _native(changes: list[str]) -> Mapping[str, Any]:
    run = compose_cluster_run(str(write("grpo.yaml", NATIVE)), changes).run
    plan = make_plan(run)
    raise_problems(plan.problems)
    return {**_values(plan.start), "plan": dict(plan.rows), "notes": plan.notes}


COMMANDS = {"layout": _layout, "check": _check, "launch": _launch, "native": _native, "driver": _drive}


def _full_key(result: str) -> str:
    code, key, value = result.split("|", 2)
    return f"{code}|{_full(key)}|{value}"


def _shown(code: str, key: str, value: Any) -> str:
    """A result as the table has it."""
    text = json.dumps(value, default=str, separators=(",", ":"))
    return f"{code}|{key}|{text}".replace(f"{Path.cwd()}/", "./")


def _problems(error: CocaError, name: str) -> list[str]:
    if isinstance(error, ConfigError) and error.problems:
        return [_shown(*problem[:3]) for problem in error.problems]
    message = str(error).replace(f"{Path.cwd()}/", "./")
    key = re.match(r"(\S+?( \S+?)?)(: |=)", message)
    return [f"{type(error).__name__}|{key[1] if key else ''}|{name if name in message else '-'}"]


@pytest.mark.parametrize("command", COMMANDS)
def test_starts(command, tmp_path, homes, monkeypatch, capsys):
    write(homes["MINDSPEED_RL_HOME"] / "configs/envs/runtime_env.yaml", yaml.safe_dump({"env_vars": SHIPPED}))
    monkeypatch.setattr(driver, "matching_manifest", lambda _root: SimpleNamespace(release="2.3.0"))
    for name in (*SHIPPED, "VLLM_ASCEND_ENABLE_NZ", CPU_SHIM):
        monkeypatch.delenv(name, raising=False)
    numbers = itertools.count()

    def check(beside: str, typed: str, expected: str) -> None:
        wanted = [_full_key(result) for result in re.split(r"; (?=[\w-]*\|)", expected) if result]
        assert wanted, "a row needs a result"
        variables, _, arguments = typed.partition(command)
        with monkeypatch.context() as patch:
            (place := tmp_path / str(next(numbers))).mkdir()
            patch.chdir(place)
            for word in beside.split():
                _set_up(word, patch)
            for variable in variables.split():
                patch.setenv(*variable.split("=", 1))
            try:
                values = COMMANDS[command](arguments.split())
                keys = [result.split("|")[1] for result in wanted if result.startswith("|")]
                found = [_shown("", key, value_of(values, key)) for key in keys]
            except CocaError as error:
                found = _problems(error, expected.rpartition("|")[2])
        assert found == wanted

    check_rows(check, [row for row in ROWS if re.search(rf"(^| ){command}( |$)", row[1])])


@pytest.mark.parametrize("typed", ["rihgt", "."])
def test_a_resume_without_a_run_names_the_runs_nearby(tmp_path, typed):
    checkpoint(tmp_path / "right/stage0/checkpoints", 4, iteration="50")
    with pytest.raises(ConfigError) as caught:
        stages_to_do(ClusterRun(_composed(RUN)), tmp_path / typed, resume=True)
    [problem] = caught.value.problems
    assert str(tmp_path / "right") in problem.fix
