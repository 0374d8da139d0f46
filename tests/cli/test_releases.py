"""Runs of earlier releases: their ``config.yaml`` and marker, beside weights and checkpoints of today."""

import json
import shutil
from pathlib import Path

import pytest

from coca_mindspeed.cli import main
from coca_mindspeed.config.compose import compose_run
from coca_mindspeed.errors import ConfigError
from tests.local.runs_for_tests import rows

RUNS = Path(__file__).parent / "runs_of_releases"  # 0.3.0: before evaluation.readings was removed
REMOVED = {
    "0.1.0": {"trainer.epochs"},
    "0.2.0": {"trainer.epochs", "confidence_start", "model.allow_open_thinking"},
    "0.3.0": {"evaluation.readings", "model.allow_open_thinking"},
}


@pytest.fixture(params=REMOVED)
def run_of_release(request, finished_demo, tmp_path):
    output = tmp_path / "run"
    shutil.copytree(finished_demo, output)
    shutil.copytree(RUNS / request.param, output, dirs_exist_ok=True)
    return output, request.param


def removed_keys(printed: str) -> set[str]:
    return {key for keys in REMOVED.values() for key in keys if key in printed}


def test_a_run_of_an_earlier_release_is_exported_and_asked(run_of_release, finished_demo, tmp_path, capsys):
    (output, release), exported = run_of_release, tmp_path / "exported"
    assert main(["export", str(output), "--output", str(exported), "--card"]) == 0
    assert removed_keys(capsys.readouterr().err) == REMOVED[release]
    assert release in (exported / "README.md").read_text()
    replies = []
    for model in (finished_demo, output, output / "model", exported):
        assert main(["ask", str(model), "2100+4300", "--samples", "4", "--json"]) == 0
        replies.append([json.loads(line) for line in capsys.readouterr().out.splitlines()])
    assert replies[0] == replies[1] == replies[2] == replies[3]


@pytest.mark.usefixtures("no_pictures")
def test_a_run_of_an_earlier_release_is_resumed_if_its_rewards_are_todays(run_of_release, capsys):
    output, release = run_of_release
    command = ["train", str(output / "config.yaml"), "--output", str(output), "--resume", "--quiet", "trainer.steps=7"]
    if release == "0.3.0":
        assert main(command) == 0
        assert removed_keys(capsys.readouterr().err) == REMOVED[release]
        assert [row["step"] for row in rows(output / "metrics.jsonl")] == list(range(1, 8))
        assert not removed_keys((output / "config.yaml").read_text())
    else:
        before = (output / "config.yaml").read_bytes()
        assert main(command) == 1
        _, refusal = capsys.readouterr().err.splitlines()
        assert "[release]" in refusal
        assert release in refusal
        assert (output / "config.yaml").read_bytes() == before


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("evaluation.readings", True),
        ("model.allow_open_thinking", True),
        ("trainer.epochs", 2),
        ("confidence_start", {"questions": 10, "steps": 100}),
    ],
)
def test_a_removed_key_with_an_effect_is_refused(key, value, tmp_path):
    section, _, name = key.rpartition(".")
    content = {"defaults": ["demo", "_self_"], **({section: {name: value}} if section else {name: value})}
    (tmp_path / "mine.yaml").write_text(json.dumps(content))
    with pytest.raises(ConfigError) as refused:
        compose_run(str(tmp_path / "mine.yaml"))
    assert [(problem.code, problem.key) for problem in refused.value.problems] == [("extra_forbidden", key)]


@pytest.mark.parametrize("override", ["evaluation.readings=false", "trainer.epochs=1", "confidence_start.questions=0"])
def test_a_removed_key_that_is_typed_is_refused(override):
    with pytest.raises(ConfigError) as refused:
        compose_run("demo", [override])
    assert [problem.code for problem in refused.value.problems] == ["extra_forbidden"]
