"""Refusals that need no torch: exit codes, the names in their messages, and that torch is not imported."""

import json
import subprocess
import sys
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import pytest

from coca_mindspeed.config.compose import compose_run, to_yaml
from coca_mindspeed.utils.directories import write_marker
from tests.local.models_for_tests import write_random_model
from tests.local.runs_for_tests import QUESTIONS, write_rows
from tests.tables import read_table

# Reads [[name, argv], ...], and writes [code, whether torch is imported, message] of each.
_PROGRAM = """
import contextlib, io, json, shutil, sys, types
from coca_mindspeed.cli import main
disk_usage, results = shutil.disk_usage, {}
for name, argv in json.load(sys.stdin):
    small = types.SimpleNamespace(free=10_000)
    shutil.disk_usage = (lambda _: small) if name == "disk" else disk_usage
    with contextlib.redirect_stderr(io.StringIO()) as said, contextlib.redirect_stdout(io.StringIO()):
        code = main(argv)
    results[name] = code, "torch" in sys.modules, said.getvalue()
json.dump(results, sys.stdout)
"""
_LOCAL = ("local", "model.path=model", "data.evaluate=others.jsonl", "rollout.max_new_tokens=8")
_WORDS = {
    "TRAIN": ("train", *_LOCAL, "--output"),
    "BASELINE": ("baseline", "verbalised", "--model", "model", "--max-new-tokens", "8", "--output"),
}
_TRAIN = (*_WORDS["TRAIN"], "new/run")
_CHECK = ("check", *_LOCAL)
_BASELINE = (*_WORDS["BASELINE"], "new/run")
# name of a file -> what its last line is
_BAD_LINES = {
    "column": {"question": "q", "gold": "1"},
    "extra": {"question": "q", "answer": "1", "level": 3},
    "truth": {"question": "q", "answer": True},
    "id": {"id": "good-1", "question": "q", "answer": "1"},
    "category": {"question": "q", "answer": "1", "category": "chemistry"},
    "gold": {"question": "q", "answer": r"\frac{1"},
    "aliases": {"question": "q", "answer": "1", "category": "factual", "metadata": {"aliases": []}},
    "worked": {"question": "q", "answer": "2+2=<<2+2=4>>4\n#### 4"},
    "blank": {"question": "q", "answer": " "},
    "judge": {"question": "q", "answer": "1", "dataset": "simpleqa"},
    "surrogate": {"question": "half \ud83d", "answer": "1"},
}

_FEW = ("column", "gold")
_ENDINGS = {"table": ".csv", "array": ".json"}


class Refusal(NamedTuple):
    argv: tuple[str, ...]
    named: Sequence[str]
    code: int = 1


def _of_file(command: tuple[str, ...], option: str) -> dict[str, Refusal]:
    """A refusal of each bad file, by a command that takes it as ``option``."""
    where = {name: f"{name}.jsonl:7" for name in _BAD_LINES}
    where |= {"category": "'category-7'", "aliases": "'aliases-7'", "judge": "judge"}
    found = {name: (where[name],) for name in _BAD_LINES}
    found["column"] += ("'answer' is missing", "'gold'")
    found["extra"] += ("'level'", "'metadata'")
    found["aliases"] += ("metadata['aliases']",)
    found["worked"] += ("data prepare",)
    found["surrogate"] += (r"'\ud83d'",)
    found |= {"broken": ("broken.jsonl:2",), "empty": ("empty.jsonl",)}
    if option.startswith("--"):  # keys take other formats too
        found |= {name: (f"{name}{ending}:1", "data prepare records") for name, ending in _ENDINGS.items()}
    refusals = {}
    for name, named in found.items():
        file = f"{name}{_ENDINGS.get(name, '.jsonl')}"
        argv = (option, file) if option.startswith("--") else (f"{option}={file}",)
        refusals[name] = Refusal((*command, *argv), named)
    return refusals


REFUSALS = {
    **{f"train, {name}": refusal for name, refusal in _of_file(_TRAIN, "data.train").items()},
    **{f"check, {name}": _of_file(_CHECK, "data.train")[name] for name in _FEW},
    **{f"baseline, {name}": _of_file(_BASELINE, "--data")[name] for name in (*_FEW, *_ENDINGS)},
    **{
        name: Refusal(
            tuple(chain(*(_WORDS.get(word, [word]) for word in words.split()))), named.split(" | "), int(code)
        )
        for name, code, words, named in read_table(__file__, "refusals.tsv")
    },
}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    place = tmp_path_factory.mktemp("refusals")
    write_random_model(place / "model", "llama")
    write_rows(place / "good.jsonl", QUESTIONS)
    others = [{**row, "question": f"Once more: {row['question']}"} for row in QUESTIONS]
    write_rows(place / "others.jsonl", others)
    write_rows(place / "bad_others.jsonl", [*others, _BAD_LINES["aliases"]])
    for name, row in _BAD_LINES.items():
        rows = [{"id": f"good-{i}", **question} for i, question in enumerate(QUESTIONS)]
        write_rows(place / f"{name}.jsonl", [*rows, row])
    (place / "broken.jsonl").write_text('{"question": "q", "answer": "1"}\n{"question": \n')
    (place / "table.csv").write_text("question,answer\nq,1\n")
    (place / "array.json").write_text('[{"question": "q", "answer": "1"}]\n')
    (place / "empty.jsonl").touch()
    (place / "mine").mkdir()
    (place / "mine" / "config.yaml").touch()
    write_marker(place / "exported", "model")
    write_marker(place / "run", "run", {"id": "0"})
    (place / "run" / "config.yaml").write_text(to_yaml(compose_run("demo", []).run))
    (place / "run" / "metrics.jsonl").write_text('{"step": 1}\n')
    cases = json.dumps([[name, refusal.argv] for name, refusal in REFUSALS.items()])
    environment = {"PYTHONPATH": str(Path(__file__).parents[2]), "PATH": "/usr/bin:/bin"}
    environment["HF_ENDPOINT"] = "http://127.0.0.1:9"  # nothing answers there
    command = [sys.executable, "-c", _PROGRAM]
    done = subprocess.run(command, input=cases, cwd=place, env=environment, capture_output=True, text=True, check=True)
    assert not (place / "new").exists()
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", REFUSALS)
def test_refused_without_torch(name, results):
    code, torch_imported, message = results[name]
    assert (code, torch_imported) == (REFUSALS[name].code, False), message
    assert all(text in message for text in REFUSALS[name].named), message
