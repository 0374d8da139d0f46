"""Cells run in the order of their needs, once; a killed one is run again, a finished one never."""

import json
from pathlib import Path

import pytest

from coca_mindspeed.errors import ConfigError, DataError, TrainingError
from coca_mindspeed.reproduce.cells import ReproductionCell, cells_of
from coca_mindspeed.reproduce.plan import Plan, plan_path, read_plan
from coca_mindspeed.reproduce.work import Workplace
from coca_mindspeed.reproduce.work_queue import run_cells
from tests.reproduce.cells_for_tests import PLAN, finish


def note(place: Workplace, cell: ReproductionCell) -> float:
    """Stands in for a cell's work; can be pickled for the processes of the pool."""
    for need in cell.needs:
        assert cell.of(need).done(place.output), f"{cell} ran before {need}"
    with (place.output / "log").open("a") as log:
        log.write(f"{cell}\n")
    finish(place.output, cell)
    return 1.0


def fail_at_joint(place: Workplace, cell: ReproductionCell) -> float:
    if cell.name == "joint":
        (cell.directory(place.output)).mkdir(parents=True)
        (cell.directory(place.output) / "predictions.jsonl").write_text("half a li")
        raise DataError("joint: as if killed")
    return note(place, cell)


def die_at_joint(place: Workplace, cell: ReproductionCell) -> float:
    import os

    if cell.name == "joint":
        os._exit(9)
    return note(place, cell)


def log(output: Path) -> list[str]:
    return (output / "log").read_text().splitlines()


def test_the_cells_of_a_plan():
    cells = cells_of(PLAN, [0, 1])
    assert len(cells) == len(set(cells)) == 2 * 9
    names = [cell.name for cell in cells if cell.seed == 0]
    assert names[:2] == ["start-first", "start-last"]
    needs = {cell.name: cell.needs for cell in cells if cell.seed == 0}
    assert needs["rlcr"] == ("start-last",)
    assert needs["coca"] == needs["majority_voting"] == ("start-first",)
    assert len({cell.directory(Path("x")) for cell in cells}) == len(cells)


@pytest.mark.parametrize("jobs", [1, 2])
def test_every_cell_runs_once_after_what_it_needs(tmp_path, jobs):
    cells, reported = cells_of(PLAN, [0, 1]), []
    run_cells(Workplace(PLAN, tmp_path), cells, jobs, lambda cell, seconds: reported.append(cell), note)
    assert sorted(log(tmp_path)) == sorted(map(str, cells))
    assert set(reported) == set(cells)
    run_cells(Workplace(PLAN, tmp_path), cells, jobs, lambda cell, seconds: pytest.fail("ran again"), note)
    assert len(log(tmp_path)) == len(cells)


@pytest.mark.parametrize(
    ("work", "error", "message"), [(fail_at_joint, DataError, "as if"), (die_at_joint, TrainingError, "a process died")]
)
def test_a_cell_that_fails_is_not_counted_and_only_what_is_missing_runs_again(tmp_path, work, error, message):
    cells = cells_of(PLAN, [0])
    place = Workplace(PLAN, tmp_path)
    with pytest.raises(error, match=message):
        run_cells(place, cells, 2, lambda cell, seconds: None, work)
    joint = next(cell for cell in cells if cell.name == "joint")
    assert not joint.done(tmp_path)
    before = log(tmp_path)
    run_cells(place, cells, 1, lambda cell, seconds: None, note)
    assert sorted(log(tmp_path)) == sorted(map(str, cells))  # each once, over both runs
    assert log(tmp_path)[: len(before)] == before


def test_ready_made_plans_are_read_and_mistakes_are_named(tmp_path):
    plan = read_plan(plan_path("miniature"))
    names = {cell.name for cell in cells_of(plan, [0])}
    assert names >= {"instruct", "rlvr", "coca", "joint", "sequential", "rlcr", "majority_voting"}
    assert names >= {"rlvr+question_prob", "rlvr+probe", "rlvr+assessor"}
    with pytest.raises(ConfigError, match=r"ready-made plans: .*miniature"):
        read_plan(plan_path("maxiature"))
    content = json.loads(PLAN.model_dump_json())
    content["settings"]["short"]["baselines"] = ["rlvr+probe"]
    del content["settings"]["short"]["trained"]["rlvr"]
    (tmp_path / "plan.yaml").write_text(json.dumps(content))
    with pytest.raises(ConfigError, match="needs 'rlvr'"):
        read_plan(tmp_path / "plan.yaml")
    (tmp_path / "plan.yaml").write_text("title: [")
    with pytest.raises(ConfigError, match="not valid YAML"):
        read_plan(tmp_path / "plan.yaml")
    with pytest.raises(ValueError, match="title"):
        Plan.model_validate({"settings": {}})
