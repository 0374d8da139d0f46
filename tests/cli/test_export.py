"""`coca-mindspeed export`: the model of a finished run, and its card."""

import json
import re
import shutil

import pytest
import yaml

from coca_mindspeed.algorithm.parsing import ResponseParser
from coca_mindspeed.cli import main
from coca_mindspeed.cli.export import model_card
from coca_mindspeed.config.compose import compose_run
from coca_mindspeed.errors import DataError
from coca_mindspeed.evaluation.metrics import HEADLINE
from coca_mindspeed.local.inputs import trained_prompt
from coca_mindspeed.utils.directories import check_directory, write_marker
from coca_mindspeed.utils.json_files import read_object, write_json


@pytest.fixture
def finished(tmp_path):
    """The files of a finished run that an export reads, by a method."""

    def write(method, *more):
        run = tmp_path / "run"
        (run / "model").mkdir(parents=True)
        (run / "model" / "config.json").write_text("{}")
        settings = [f"method={method}", "model.path=/home/me/base", "data.train=t", "data.evaluate=e", *more]
        config = compose_run("local", settings)
        (run / "config.yaml").write_text(config.to_yaml())
        scores = {**dict.fromkeys(HEADLINE, 0.25), "auroc": None, "n": 60}
        write_json(run / "summary.json", {"after": scores})
        data = {"train": {"records": 156, "sha256": "ab12"}, "evaluate": {"records": 60, "sha256": "cd34"}}
        write_marker(run, "run", {"version": "0.3.0", "data": data})
        return run

    return write


def test_the_best_model_and_its_figures(finished, tmp_path, capsys):
    run, command = (
        finished("coca"),
        ["export", str(tmp_path / "run"), "--output", str(tmp_path / "out"), "--best", "--card"],
    )
    assert main(command) == 1
    assert (
        "best_model of a run; expected the directory of a finished local run with checkpoint.best"
        in capsys.readouterr().err
    )
    (run / "best_model").mkdir()
    (run / "best_model" / "config.json").write_text("best")
    write_json(run / "best_model" / "best.json", {"metric": "eval/brier", "value": 0.1, "step": 50})
    rows = [{"step": step, "eval/accuracy": 0.5, "eval/brier": 0.1 * step} for step in (1, 50)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(command) == 0
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "README.md",
        "coca-mindspeed.json",
        "coca_prompt.json",
        "config.json",
    ]
    assert (tmp_path / "out" / "config.json").read_text() == "best"
    row = next(line for line in (tmp_path / "out" / "README.md").read_text().splitlines() if line.startswith("| after"))
    assert ("50.0%" in row, "60" in row) == (True, True)


@pytest.mark.parametrize(("before", "after", "says"), [(4, 2, False), (30, 12, True), (12, 30, False)])
def test_a_card_says_that_accuracy_was_lost_only_beyond_chance(finished, tmp_path, before, after, says):
    run, count = finished("coca"), 60
    scores = read_object(run / "summary.json")["after"]
    by_name = {"before": before, "after": after}
    write_json(run / "summary.json", {when: {**scores, "accuracy": n / count} for when, n in by_name.items()})
    for when, right in by_name.items():
        answers = [{"id": str(i), "confidence": 0.5, "correct": i < right} for i in range(count)]
        (run / f"predictions_{when}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in answers))
    assert main(["export", str(run), "--output", str(tmp_path / "out"), "--card"]) == 0
    assert ("**The training cost accuracy**" in (tmp_path / "out" / "README.md").read_text()) is says


def test_a_card_names_the_base_model_and_no_folder_of_the_author(finished, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("def grade(record, answer): return True\n")
    own = ["data.grader=mine.py:grade", "model.path=org/base", "data.train=t", "data.evaluate=e"]
    config = compose_run("local", own).run
    scores = {**dict.fromkeys(HEADLINE, 0.5), "n": 40}
    marker = {"version": "0.3.0", "data": {}}
    summary = {"before": {**scores, "accuracy": 0.75}, "after": scores, "questions": {"held_out": 40, "shared": 7}}
    about = (config, trained_prompt(config, []).form, summary, marker)
    card = model_card("x", *about, lost_accuracy=True)
    assert yaml.safe_load(card.split("---\n")[1])["base_model"] == "org/base"
    assert "grader (`mine.py`)" in card
    assert str(tmp_path) not in card
    assert "75.0% before, 50.0% after." in card
    assert "75.0% before" not in model_card("x", *about)
    assert "7 of the 40" in card


@pytest.mark.parametrize(
    ("method", "more", "stated"),
    [
        ("coca", [], "0.83"),
        ("rlcr", [], "0.83"),
        ("caliber", ["method.confidence_decimals=2"], "0.7"),
        ("coca", ["method.thinking=true", "method.confidence_decimals=3"], "0.83"),
    ],
)
def test_the_card_states_metrics_format_and_data(finished, tmp_path, capsys, monkeypatch, method, more, stated):
    run, output, parsers = finished(method, *more), tmp_path / "out", []
    assert main(["export", str(run), "--output", str(output), "--card"]) == 0
    assert (output / "config.json").read_text() == "{}"
    trained = compose_run(str(run / "config.yaml")).run.method
    card = (output / "README.md").read_text()
    assert yaml.safe_load(card.split("---\n")[1])["library_name"] == "transformers"
    assert trained.system_prompt in card
    row = next(line for line in card.splitlines() if line.startswith("| after"))
    assert ("25.0%" in row, "--" in row, "60" in row) == (True, True, True)
    assert all(text in card for text in ("156", "ab12", "cd34"))
    assert "/home/me" not in card
    code = re.search(r"```python\n(.*?)```", card, re.DOTALL)
    capsys.readouterr()
    with monkeypatch.context() as patched:
        patched.setattr("coca_mindspeed.parse_response", lambda text, **how: parsers.append(ResponseParser(**how)))
        with pytest.raises(AttributeError):  # of no parsed response
            exec(code[1], {})  # noqa: S102 - written by our own command
    assert parsers == [trained.parser(in_training=False)]
    exec(code[1], {})  # noqa: S102
    assert capsys.readouterr().out.split() == [stated, "The", "answer", "is", "42."]


@pytest.mark.parametrize("missing", ["model/config.json", "summary.json", "coca-mindspeed.json"])
def test_an_unfinished_run_is_refused(finished, tmp_path, capsys, missing):
    run = finished("coca")
    (run / missing).unlink()
    if missing.startswith("model"):
        (run / "model").rmdir()
    assert main(["export", str(run), "--output", str(tmp_path / "out"), "--card"]) == 1
    assert missing.split("/")[0] in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("folder", ["stage0", "checkpoints"])
def test_a_run_on_mindspeed_rl_is_the_converters(tmp_path, capsys, folder):
    (tmp_path / "run" / folder).mkdir(parents=True)
    assert main(["export", str(tmp_path / "run"), "--output", str(tmp_path / "out")]) == 1
    command = f"launch/convert_weights.sh mcore2hf RUN --output {tmp_path / 'run'}"
    assert (command in capsys.readouterr().err) == (folder == "stage0")


@pytest.mark.parametrize("content", ['{"after": ', "[]", '{"after": [], "questions": {}}', "\udcff"])
@pytest.mark.parametrize("command", ["report", "export --card", "export --card --best"])
def test_a_damaged_file_of_a_run_is_named(finished_demo, tmp_path, capsys, command, content):
    run = shutil.copytree(finished_demo, tmp_path / "run")
    damaged = run / ("best_model/best.json" if "--best" in command else "summary.json")
    damaged.parent.mkdir(exist_ok=True)
    damaged.write_text(content, encoding="utf-8", errors="surrogateescape")
    name, *options = command.split()
    output = [] if name == "report" else ["--output", str(tmp_path / "out")]
    assert main([name, str(run), *output, *options]) == 1
    assert f"{damaged}: " in capsys.readouterr().err


def test_the_settings_of_collected_results_are_damaged(tmp_path):
    (tmp_path / "settings.json").write_text("[]")
    with pytest.raises(DataError, match=r"settings\.json: expected a JSON object, found list"):
        check_directory(tmp_path, {"model": "m"})
