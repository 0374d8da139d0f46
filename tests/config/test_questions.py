"""Questions of a run: training and evaluation share no file, and what both ask is counted."""

import json
import os
import shutil
from pathlib import Path

import pytest

from coca_mindspeed.cli import main
from coca_mindspeed.config.checks import same_data
from coca_mindspeed.config.compose import compose_run
from coca_mindspeed.config.plan import QuestionCounts, question_rows
from coca_mindspeed.errors import ConfigError
from coca_mindspeed.local.start import check_settings
from tests.local.models_for_tests import write_random_model
from tests.local.runs_for_tests import HELD_OUT, QUESTIONS, arguments, write_rows

CODES = {
    "path": ["same-data"],
    "another spelling of the path": ["same-data"],
    "symbolic link": ["same-data"],
    "hard link": ["same-data"],
    "copy": ["same-data"],
    "other questions": [],
    "none": [],
}


def pair(directory: Path, kind: str) -> tuple[Path, Path | None]:
    """A training file and a held-out file of some kind."""
    train, evaluate = write_rows(directory / "train.jsonl", QUESTIONS), directory / "heldout.jsonl"
    if kind == "path":
        return train, train
    if kind == "another spelling of the path":
        (directory / "x").mkdir()
        return train, directory / "x" / ".." / "train.jsonl"
    if kind == "symbolic link":
        evaluate.symlink_to(train)
    elif kind == "hard link":
        os.link(train, evaluate)
    elif kind == "copy":
        shutil.copy(train, evaluate)
    elif kind == "other questions":  # of the same size
        evaluate.write_text(train.read_text().replace("What", "that"))
    return train, None if kind == "none" else evaluate


@pytest.mark.parametrize("kind", CODES)
def test_one_file_is_not_both_training_and_evaluation(tmp_path, kind):
    train, evaluate = pair(tmp_path, kind)
    data = [f"data.train={train}", f"data.evaluate={'null' if evaluate is None else evaluate}"]
    run = compose_run("local", ["model.path=m", *data]).run
    assert [(problem.code, problem.key) for problem in same_data(run)] == [(c, "data.evaluate") for c in CODES[kind]]
    ascend = main(["check", "qwen25_7b_910b", "rollout.prompts=8", "data.epochs=null", "trainer.steps=1", *data])
    assert (ascend == 1) == bool(CODES[kind])


def test_the_name_of_one_data_set_of_the_hub_twice():
    run = compose_run("local", ["model.path=m", "data.train=org/name", "data.evaluate=org/name"]).run
    assert [problem.code for problem in same_data(run)] == ["same-data"]
    run = compose_run("local", ["model.path=m", "data.train=org/name", "data.evaluate='org/name::test'"]).run
    assert not list(same_data(run))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_random_model(tmp_path_factory.mktemp("models") / "model", "qwen2")


def test_a_run_that_began_with_one_file_for_both_goes_on(tmp_path):
    files = [f"data.{key}={write_rows(tmp_path / 'train.jsonl', QUESTIONS)}" for key in ("train", "evaluate")]
    run = compose_run("local", [f"model.path={tmp_path}", *files]).run
    (tmp_path / "config.json").touch()
    check_settings(run, resume=True)
    with pytest.raises(ConfigError):
        check_settings(run)


@pytest.mark.usefixtures("verls_keys")
@pytest.mark.parametrize("more", [(), ("trainer.test_freq=-1", "trainer.val_before_train=false")], ids=["on", "off"])
@pytest.mark.parametrize("kind", ["copy", "path", "other questions"])
def test_verl_refuses_it_if_it_evaluates(tmp_path, kind, more, capsys):
    train, evaluate = tmp_path / "train.jsonl", tmp_path / ("train.jsonl" if kind == "path" else "heldout.jsonl")
    for path, rows in {evaluate: HELD_OUT, train: QUESTIONS}.items():
        records = write_rows(tmp_path / "records.jsonl", rows)
        assert main(["data", "export", "verl", "--input", str(records), "--output", str(path), "--overwrite"]) == 0
    if kind == "copy":
        shutil.copy(train, evaluate)
    files = [f"data.train_files=[{train}]", f"data.val_files={evaluate}"]
    files += ["data.train_batch_size=2", "actor_rollout_ref.actor.ppo_mini_batch_size=2"]
    code = main(["check", "coca_qwen25_7b", *files, *more])
    shown = capsys.readouterr()
    assert (code, "[same-data]" in shown.err) == ((1, True) if kind != "other questions" and not more else (0, False))
    if code == 0:
        assert ("held-out questions" in shown.out) == (not more)


@pytest.mark.parametrize(
    ("train", "evaluate", "asked", "counts", "codes"),
    [
        ("abcd", "ef", 4, (4, 4, 1.0, 2, 0), []),
        ("abcd", "", 2, (4, 4, 1.0, 0, 0), []),
        ("aabc", "aad", 6, (3, 4, 2.0, 2, 1), ["questions-shared"]),
        ("ab", "", 19, (2, 2, 9.5, 0, 0), []),
        ("ab", "", 20, (2, 2, 10.0, 0, 0), ["questions-repeated"]),
        ("ab", "ab", 200, (2, 2, 100.0, 2, 2), ["questions-repeated", "questions-shared"]),
    ],
)
def test_questions_are_counted_by_their_text(train, evaluate, asked, counts, codes):
    found = QuestionCounts.of(train, evaluate, asked)
    assert (found.train, found.records, found.times, found.held_out, found.shared) == counts
    assert [problem.code for problem in found.warnings("t", "T", "e", "E")] == codes
    assert [name for name, _ in question_rows(found)] == ["questions", "held-out questions"][: 1 + bool(evaluate)]


@pytest.mark.usefixtures("no_pictures")
def test_the_plan_the_run_and_its_report_count_them(tmp_path, model, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")  # a row in one line
    write_rows(tmp_path / "heldout.jsonl", [*HELD_OUT, *QUESTIONS[:2]])
    train = arguments(tmp_path, model, "trainer.steps=30")
    other = f"data.train={write_rows(tmp_path / 'other.jsonl', [*QUESTIONS, {**QUESTIONS[0], 'answer': '7'}])}"
    assert main(["check", *train[1 : train.index("--output")], "trainer.steps=30", other, "--quiet"]) == 0
    warned = capsys.readouterr().err
    assert "[gold-contradicts]" in warned
    assert "[questions-repeated]" in warned  # 60 questions of 6
    assert "[questions-shared]" in warned
    assert main(["check", *train[1 : train.index("--output")]]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = {line.strip(" │|").partition("  ")[0]: line for line in lines}
    assert "6 different ones in 6 records" in rows["questions"]
    assert "8 different ones, 2 of them" in rows["held-out questions"]
    assert any(line.startswith("time: unknown") for line in lines)  # evaluation.preflight=0
    assert main(arguments(tmp_path, model, "evaluation.final_questions=null")) == 0
    counts = json.loads((tmp_path / "run" / "summary.json").read_text())["questions"]
    assert counts == {"train": 6, "records": 6, "times": 1.0, "held_out": 8, "shared": 2}
    assert "2 of the 8 different held-out" in (tmp_path / "run" / "report.md").read_text()
    warned = capsys.readouterr().err
    assert "[questions-shared]" in warned
    assert "[questions-repeated]" not in warned


def test_a_plan_for_ascend_counts_them(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    data = [f"data.train={write_rows(tmp_path / 'train.jsonl', QUESTIONS)}", "data.epochs=null", "trainer.steps=2"]
    data.append(f"data.evaluate={write_rows(tmp_path / 'heldout.jsonl', [*HELD_OUT, QUESTIONS[0]])}")
    assert main(["check", "qwen25_7b_910b", *data]) == 0
    shown = capsys.readouterr()
    rows = {line.strip(" │|").partition("  ")[0]: line for line in shown.out.splitlines()}
    assert "6 different ones in 6 records; each is asked 42.7 times" in rows["questions"]
    assert "7 different ones, 1 of them" in rows["held-out questions"]
    assert "[questions-repeated]" in shown.err
    assert "[questions-shared]" in shown.err
