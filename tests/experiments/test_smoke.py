"""A reproduction of one method from the plan to the tables; the other experiments are known to their command."""

import csv

import pytest
import yaml

from experiments.__main__ import COMMANDS, main
from experiments.reproduce.plan import jobs_of, read_plan
from tests.experiments.reproduce.test_end_to_end import PLAN


def test_one_method(tmp_path, monkeypatch):
    monkeypatch.setattr("experiments.reproduce.report.save_figure", lambda *_: None)  # takes seconds
    plan = yaml.safe_load(PLAN.read_text())
    short = {**plan["settings"]["short"], "trained": {"coca": ["method=coca"]}, "baselines": ["instruct"]}
    written = tmp_path / "plan.yaml"
    written.write_text(yaml.safe_dump({**plan, "settings": {"short": short}}))
    output = tmp_path / "out"
    assert main(["reproduce", "--plan", str(written), "--seeds", "1", "--jobs", "1", "--output", str(output)]) == 0
    jobs = jobs_of(read_plan(written), [0])
    assert all(job.done(output) for job in jobs)
    [trained] = [job for job in jobs if job.name == "coca"]
    assert {prediction.category for prediction in trained.predictions(output)} == {"math", "code", "factual"}
    with (output / "report" / "short_main.csv").open() as file:
        assert {row["method"] for row in csv.DictReader(file)} == {"instruct", "coca"}


@pytest.mark.parametrize("command", COMMANDS)
def test_help(command, capsys):
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0
    assert f"python -m experiments {command}" in capsys.readouterr().out
