"""Files that starts of the ready-made MindSpeed-RL runs write, with usual edits, as ``run_files.tsv`` has frozen them.

A row of the table has three columns: overrides, a result, and patterns of the runs that it holds for. Results are those
of ``starts.tsv``: ``|key|value`` of the written file, or ``code|key|`` of a problem, if the start is refused. Without
overrides the rows are the whole files; with overrides they are the differences from them, and ``absent`` is the value
of a key that is left out. Paths in the working directory begin with ``./``.

``python -m tests.mindspeed.test_run_files`` writes the table anew.
"""

import contextlib
import io
import json
import os
import re
import tempfile
from collections.abc import Iterable, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import yaml

from coca_mindspeed.cli import main
from tests.tables import read_table

TABLE = Path(__file__).with_name("run_files.tsv")
HEADING = "overrides\tcode|key| of each problem, or |key|value of the written file\truns"
RUNS = sorted(path.stem for path in (Path(__file__).parents[2] / "configs").glob("*_910?.yaml"))
_PACKING = "mindspeed_rl.rl_config.{0}_max_packing_token_size=10240".format
EDITS = (
    "",
    "optimizer.lr=3e-6",
    "rollout.group_size=8",
    "rollout.prompts=64",
    "trainer.minibatches=4",
    f"rollout.max_new_tokens=8192 {_PACKING('actor')} {_PACKING('update')}",
    "rollout.max_new_tokens=3072",
    "parallel=tp2pp2",
    "hardware.nodes=2",
    "data.train=a.jsonl data.evaluate=b.jsonl data.grader=auto data.epochs=null trainer.steps=300",
    "model.path=/m/Q",
    "data.epochs=null trainer.steps=100",
    "data.epochs=0.5",
    "method=joint",
    "method.entropy_bonus=0.02",
    "method=coca_stable",
    "method.clip=0.1",
    "data.epochs=null trainer.steps=100 optimizer.warmup_steps=20",
    "seed=7",
    "checkpoint.interval=20 checkpoint.keep=5",
    "logging.wandb=p",
    "mindspeed_rl.generate_config.gpu_memory_utilization=0.6",
)
Results = dict[str, str]  # "code|key" or "|key": value


def _values(section: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    for name, value in section.items():
        if isinstance(value, dict) and value:
            yield from _values(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def start(run: str, overrides: str) -> Results:
    """The file that a start in the working directory writes, or the problems for which it is refused."""
    file, out, err = Path("written.yaml"), io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        command = ["check", run, *overrides.split(), "--quiet", "--output", "run", "--write", str(file)]
        code = main(command)
    if code:
        problems = re.findall(r"^(?:coca-mindspeed: )?([\w.-]+)[=:].*\[([\w-]+)\]$", err.getvalue(), re.MULTILINE)
        problems = [problem for problem in problems if problem[0] != "warning"]
        assert problems, err.getvalue()
        return {f"{problem}|{key}": "" for key, problem in problems}
    written = _values(yaml.safe_load(file.read_text()))
    shown = ((key, json.dumps(value, separators=(",", ":"))) for key, value in written)
    return {f"|{key}": value.replace(f"{Path.cwd()}/", "./") for key, value in shown}


def edited(run: str, overrides: str, whole: Results) -> Results:
    """The results of a start with overrides: its problems, or the differences from the ``whole`` file without them."""
    now = start(run, overrides)
    if not overrides or not all(key.startswith("|") for key in now):
        return now
    keys = {**whole, **now}
    return {key: now.get(key, "absent") for key in keys if now.get(key) != whole.get(key)}


def frozen(run: str, overrides: str) -> Results:
    results = {}
    for edit, result, runs in read_table(__file__, TABLE.name):
        if edit == overrides and any(fnmatch(run, pattern) for pattern in runs.split()):
            code, key, value = result.split("|", 2)
            results[f"{code}|{key}"] = value
    return results


def differences(run: str, edits: Iterable[str]) -> list[str]:
    """What has changed of a run's starts: overrides and key, the frozen result, and that of now."""
    lines, whole = [], start(run, "")
    for overrides in edits:
        then, now = frozen(run, overrides), edited(run, overrides, whole)
        for key in {**then, **now}:
            if then.get(key) != now.get(key):
                changed = f"frozen: {then.get(key, 'no row')}\n    now:    {now.get(key, 'no row')}"
                lines.append(f"{run} [{overrides}] {key}\n    {changed}")
    return lines


def patterns(names: list[str]) -> str:
    """Patterns that match these of the runs and no others."""
    for pattern in ("*", "*_910b", "*_910c"):
        if names == [run for run in RUNS if fnmatch(run, pattern)]:
            return pattern
    stems = {name: f"{name[:-1]}?" for name in names}
    both = {stem for stem in stems.values() if [*stems.values()].count(stem) == 2}
    return " ".join(dict.fromkeys(stem if stem in both else name for name, stem in stems.items()))


def freeze() -> None:
    """Write the table anew."""
    rows: dict[tuple[int, str, str], list[str]] = {}
    for run in RUNS:
        whole = start(run, "")
        for number, overrides in enumerate(EDITS):
            for key, value in edited(run, overrides, whole).items():
                rows.setdefault((number, key, value), []).append(run)
    lines = [f"{EDITS[number]}\t{key}|{value}\t{patterns(runs)}" for (number, key, value), runs in sorted(rows.items())]
    TABLE.write_text("\n".join([HEADING, *lines, ""]), encoding="utf-8")


@pytest.mark.parametrize("run", RUNS)
def test_the_files_of_runs(run, tmp_path, monkeypatch):
    """Those of one run with every edit; the next test is about the others."""
    monkeypatch.chdir(tmp_path)
    changed = differences(run, EDITS if run == "qwen25_7b_910b" else EDITS[:1])
    assert not changed, "\n".join(changed)


@pytest.mark.nightly
@pytest.mark.parametrize("run", RUNS)
def test_the_files_of_runs_with_edits(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    changed = differences(run, EDITS)
    assert not changed, "\n".join(changed)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        os.chdir(directory)
        freeze()
