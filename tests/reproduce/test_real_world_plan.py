"""A plan on a model of one's own and questions about the real world: the format first, then every method."""

import csv
import json
from pathlib import Path

import pytest
import yaml

from coca_mindspeed import cli
from coca_mindspeed.config.compose import config_directory
from coca_mindspeed.data.records import read_records
from coca_mindspeed.errors import ConfigError
from coca_mindspeed.evaluation.predictions import read_predictions
from coca_mindspeed.reproduce.cells import cells_of, run_config
from coca_mindspeed.reproduce.plan import read_plan
from tests.local.models_for_tests import write_random_model

PLANS = ("smollm2", "smollm2_demo")


def tiny_plan(directory: Path, **changed) -> Path:
    write_random_model(directory / "model", "llama")
    plan = yaml.safe_load((config_directory() / "reproduce" / "smollm2.yaml").read_text(encoding="utf-8"))
    setting = plan["settings"]["real"]
    setting["real_world"] = {"train": 8, "evaluate": 2, "warm_up": 4}
    setting["overrides"] += [
        *(f"model.path={directory}/model", "warm_up.steps=3", "warm_up.batch=4"),
        *("warm_up.lr=0.001", "rollout.prompts=4", "rollout.group_size=4", "rollout.max_prompt_tokens=480"),
        *("rollout.max_new_tokens=32", "trainer.steps=2", "trainer.device=cpu", "trainer.threads=1"),
    ]
    setting["trained"].pop("coca, started")  # a random model that has seen three updates writes no confidence
    setting |= changed
    plan |= {"samples": 2, "predictor_questions": 30}
    (directory / "plan.yaml").write_text(yaml.safe_dump(plan))
    return directory / "plan.yaml"


@pytest.mark.slow
def test_two_steps_of_every_method(tmp_path, capsys):
    plan, output, report = tiny_plan(tmp_path), tmp_path / "out", tmp_path / "report"
    # The random model's vocabulary needs many tokens for a name.
    command = ["reproduce", "--plan", str(plan), "--seeds", "1", "--jobs", "1", "--output", str(output)]
    assert cli.main([*command, "--report", str(report)]) == 0
    cells = cells_of(read_plan(plan), [0])
    assert {cell.name for cell in cells} == {
        *("start-first", "start-last", "rlvr", "coca", "joint", "rlcr"),
        *("instruct", "rlvr+question_prob", "rlvr+probe", "majority_voting"),
    }
    assert all(cell.done(output) for cell in cells)
    evaluate = {r.id: r for r in read_records(output / "real" / "tasks" / "evaluate.jsonl")}
    assert {r.category for r in evaluate.values()} == {"trained", "near", "far"}
    for cell in cells:
        if cell.kind == "start":
            assert (cell.directory(output) / "warm_start" / "config.json").is_file()
            continue
        predictions = read_predictions(cell.directory(output) / "predictions.jsonl")
        assert {p.id for p in predictions} == set(evaluate)
    for cell in cells:
        if cell.kind == "trained":
            config = yaml.safe_load((cell.directory(output) / "run" / "config.yaml").read_text())
            last = "last" if cell.name == "rlcr" else "first"
            assert config["model"]["path"].endswith(f"start-{last}/warm_start")
            assert config["warm_up"]["records"] is None  # once is enough
    with (report / "claims.csv").open() as file:
        claims = [row["claim"] for row in csv.DictReader(file)]
    for category in ("trained", "near", "far"):
        assert any(f"real world, {category}: coca has a lower ECE than instruct" in claim for claim in claims)
    # Once more: nothing is left to do, and nothing is done.
    when = {cell: (cell.directory(output) / "cell.json").stat().st_mtime_ns for cell in cells}
    assert cli.main([*command, "--report", str(report)]) == 0
    assert "0 to run" in capsys.readouterr().out
    assert {cell: (cell.directory(output) / "cell.json").stat().st_mtime_ns for cell in cells} == when


def test_a_start_on_more_questions_than_there_are_is_refused_before_the_first_cell(tmp_path, capsys):
    trained = {"coca": ["method=coca"], "coca, started": ["method=coca", "confidence_start.questions=999"]}
    plan = tiny_plan(tmp_path, trained=trained, baselines=["instruct"])
    output = tmp_path / "out"
    assert cli.main(["reproduce", "--plan", str(plan), "--seeds", "1", "--output", str(output)]) == 1
    assert "confidence_start.questions=999: " in capsys.readouterr().err
    assert not list(output.rglob("cell.json"))


@pytest.mark.parametrize("name", PLANS)
def test_the_ready_made_plans_name_runs_that_exist(name):
    plan = read_plan(config_directory() / "reproduce" / f"{name}.yaml")
    setting = plan.settings["real"]
    for overrides in setting.trained.values():
        run = run_config(setting, overrides, 0)
        assert run.model.path == "models/smollm2"
        assert run.rollout.prompts * run.rollout.group_size == 96
    assert {"instruct"} <= set(setting.baselines)


def test_the_demo_is_a_part_of_the_plan():
    """The same settings, so that its figures are those of the whole."""
    whole, demo = (
        json.loads(read_plan(config_directory() / "reproduce" / f"{name}.yaml").model_dump_json()) for name in PLANS
    )
    for same in ("run", "real_world", "overrides"):
        assert demo["settings"]["real"][same] == whole["settings"]["real"][same]
    assert demo["settings"]["real"]["trained"].items() <= whole["settings"]["real"]["trained"].items()


def test_a_plan_has_one_kind_of_data(tmp_path):
    with pytest.raises(ConfigError, match="has both 'miniature' and 'real_world'"):
        read_plan(tiny_plan(tmp_path, miniature="short"))
