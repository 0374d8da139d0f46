"""A half-finished training goes on under another name of the reproduction's directory, and only then."""

import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from coca_mindspeed import cli
from coca_mindspeed.config.compose import to_yaml
from coca_mindspeed.config.schema import RunConfig
from coca_mindspeed.errors import ConfigError
from coca_mindspeed.local.run_directory import FoundRun, refuse_another_run
from coca_mindspeed.reproduce import work_queue
from coca_mindspeed.reproduce.cells import ReproductionCell
from coca_mindspeed.reproduce.plan import Plan
from coca_mindspeed.reproduce.renaming import follow_renaming

PLAN = Plan.model_validate(
    {"title": "T", "settings": {"s": {"title": "S", "run": "demo", "miniature": "short", "trained": {"coca": []}}}}
)


@dataclass(frozen=True)
class Begun:
    """The directory of a training, and the configuration that it is to go on by."""

    run: Path
    config: RunConfig

    def refuse(self):
        refuse_another_run(FoundRun(self.run, {"data": {}}, begun=True), self.config, {})


def configured(output):
    """A cell and its configuration, as it would be composed and told where the start is."""
    cell = ReproductionCell("s", 0, "coca", "trained", ("start-first",))
    start = cell.of("start-first").directory(output) / "warm_start"
    tasks = output / "s" / "tasks"
    data = {"name": "records", "train": str(tasks / "train.jsonl"), "evaluate": str(tasks / "evaluate.jsonl")}
    return cell, RunConfig.model_validate({"model": {"path": str(start)}, "data": data})


def begun(before, output, **changed):
    """A training that was begun while ``output`` was called ``before``."""
    cell, saved = configured(before)
    run = cell.directory(output) / "run"
    run.mkdir(parents=True)
    (run / "config.yaml").write_text(to_yaml(saved.model_copy(update=changed)))
    return Begun(run, configured(output)[1])


@pytest.mark.parametrize("before", ["runs/x", "x", "/elsewhere/runs/y"])
def test_another_name_of_the_directory_is_no_other_run(tmp_path, before):
    training = begun(Path(before), tmp_path)
    with pytest.raises(ConfigError, match="the run to resume has"):
        training.refuse()
    follow_renaming(training.run, training.config, tmp_path)
    training.refuse()
    content = (training.run / "config.yaml").read_text()
    follow_renaming(training.run, training.config, tmp_path)
    assert (training.run / "config.yaml").read_text() == content


def test_other_files_and_settings_are_another_run(tmp_path):
    training = begun(tmp_path / "before", tmp_path, seed=7)
    follow_renaming(training.run, training.config, tmp_path)
    with pytest.raises(ConfigError, match="the run to resume has seed=7, found 0"):
        training.refuse()
    shutil.rmtree(training.run)
    follow_renaming(training.run, training.config, tmp_path)  # nothing is there, and nothing is made
    assert not training.run.exists()
    other = begun(tmp_path / "before", tmp_path)
    values = yaml.safe_load((other.run / "config.yaml").read_text())
    values["model"]["path"] = "/models/another"
    (other.run / "config.yaml").write_text(yaml.safe_dump(values))
    follow_renaming(other.run, other.config, tmp_path)
    with pytest.raises(ConfigError, match=r"the run to resume has model\.path='/models/another'"):
        other.refuse()
    (other.run / "config.yaml").write_text("model: [")
    follow_renaming(other.run, other.config, tmp_path)
    with pytest.raises(ConfigError, match="cannot be read"):
        other.refuse()


def test_every_cell_is_told_one_name_of_the_directory(tmp_path, monkeypatch):
    """However ``--output`` was typed, and wherever the command was started."""
    told = []

    def stop(place, cell):
        told.append(place.output)
        raise KeyboardInterrupt

    (tmp_path / "plan.yaml").write_text(PLAN.model_copy(update={"train_questions": 100}).model_dump_json())
    (tmp_path / "link").symlink_to(tmp_path)
    monkeypatch.setattr(work_queue.run_cells, "__defaults__", (stop,))
    command = ["reproduce", "--plan", str(tmp_path / "plan.yaml"), "--seeds", "1", "--jobs", "1", "--output"]
    for directory, output in (
        (tmp_path, "out"),
        (tmp_path.parent, f"{tmp_path.name}/out"),
        (tmp_path, str(tmp_path / "link" / "out")),
    ):
        monkeypatch.chdir(directory)
        assert cli.main([*command, output]) == 130
    assert told == [(tmp_path / "out").resolve()] * 3
