"""Cells run in the order of their needs, once; a killed one is run again, a finished one never."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from coca_mindspeed import cli
from coca_mindspeed.baselines.resumable import claim_directory
from coca_mindspeed.data.arithmetic import arithmetic_records
from coca_mindspeed.data.records import write_records
from coca_mindspeed.errors import ConfigError, DataError, TrainingError
from coca_mindspeed.reproduce import provenance
from coca_mindspeed.reproduce.cells import ReproductionCell, cells_of
from coca_mindspeed.reproduce.plan import Plan, plan_path, read_plan
from coca_mindspeed.reproduce.provenance import check_made_from, made_from, source_commit
from coca_mindspeed.reproduce.work import Workplace
from coca_mindspeed.reproduce.work_queue import run_cells
from tests.local.models_for_tests import write_random_model
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
    assert [(cell.name, cell.seed) for cell in cells[:4]] == [
        ("start-first", 0),
        ("start-first", 1),
        ("rlvr", 0),
        ("rlvr", 1),
    ]  # stopped anywhere, what is compared has the same seeds
    names = [cell.name for cell in cells if cell.seed == 0]
    assert names.index("start-last") + 1 == names.index("rlcr")
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


def test_finished_cells_of_something_else_are_refused(tmp_path, monkeypatch):
    """Data and weights are files: their names say nothing of what is in them."""
    records = tmp_path / "records.jsonl"
    write_records(records, arithmetic_records(40, "train", 0))
    plan = _plan_on(records)
    cell = next(cell for cell in cells_of(plan, [0]) if cell.name == "coca")
    output = tmp_path / "out"
    check_made_from(plan, [cell], output)  # not done: nothing to compare
    finish(output, cell)
    check_made_from(plan, [cell], output)  # of before it was written down
    summary = cell.summary(output) | {"made_from": made_from(plan, cell, output)}
    (cell.directory(output) / "cell.json").write_text(json.dumps(summary))
    check_made_from(plan, [cell], output)
    write_records(records, arithmetic_records(40, "train", 1))
    with pytest.raises(ConfigError, match=r"seed_0/coca: was made with questions\.evaluate="):
        check_made_from(plan, [cell], output)
    write_records(records, arithmetic_records(40, "train", 0))
    check_made_from(plan, [cell], output)
    other = _plan_on(records, "optimizer.lr=0.125")
    with pytest.raises(ConfigError, match=r"made with settings\.optimizer\.lr=.*found 0\.125"):
        check_made_from(other, [cell], output)
    check_made_from(_plan_on(records, "trainer.threads=1", "logging.tensorboard=false"), [cell], output)
    # Free-form keys are compared whole, and files that are not here any more are not.
    summary["made_from"]["settings"]["data"]["grader_options"] = {"tolerance": 1}
    (cell.directory(output) / "cell.json").write_text(json.dumps(summary))
    with pytest.raises(ConfigError, match=r"settings\.data\.grader_options\.tolerance=1, found None"):
        check_made_from(plan, [cell], output)
    summary["made_from"]["settings"]["data"]["grader_options"] = {}
    (cell.directory(output) / "cell.json").write_text(json.dumps(summary))
    records.unlink()
    check_made_from(plan, [cell], output)
    write_records(records, arithmetic_records(40, "train", 0))
    del summary["made_from"]["settings"]["optimizer"]["lr"]  # a key that its version did not have
    (cell.directory(output) / "cell.json").write_text(json.dumps(summary))
    check_made_from(other, [cell], output)


def _plan_on(records: Path, *overrides: str) -> Plan:
    setting = {
        "title": "Sums",
        "run": "demo",
        "overrides": ["data.name=records", f"data.train={records}", f"data.evaluate={records}", *overrides],
        "trained": {"coca": ["method=coca"]},
    }
    return Plan.model_validate({"title": "On records", "settings": {"sums": setting}})


def test_weights_are_compared_by_content(tmp_path):
    write_random_model(tmp_path / "model", "llama")
    records = tmp_path / "records.jsonl"
    write_records(records, arithmetic_records(40, "train", 0))
    plan = _plan_on(records, f"model.path={tmp_path}/model")
    cell = cells_of(plan, [0])[-1]
    before = made_from(plan, cell, tmp_path)["weights"]
    weights = tmp_path / "model" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    provenance._weights.cache_clear()
    assert made_from(plan, cell, tmp_path)["weights"] not in (None, before)


def test_source_names_commit_and_machine():
    assert provenance.source()["commit"] == source_commit()
    assert f"PyTorch {torch.__version__}" in provenance.source()["machine"]


def test_a_second_process_is_refused(tmp_path, capsys):
    plan = tmp_path / "plan.yaml"
    plan.write_text(PLAN.model_dump_json())
    (tmp_path / "out").mkdir()
    command = ["reproduce", "--plan", str(plan), "--seeds", "1", "--jobs", "1", "--output", str(tmp_path / "out")]
    (tmp_path / "out" / "settings.json").write_text(json.dumps({"plan": PLAN.model_dump(mode="json")}))
    hold = "import sys; from pathlib import Path; from coca_mindspeed.utils.files import lock_of_process as l; "
    hold += "f = l(Path(sys.argv[1])); print('held', flush=True); sys.stdin.read()"
    other = subprocess.Popen(
        [sys.executable, "-c", hold, str(tmp_path / "out" / ".lock")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert other.stdout.readline() == b"held\n"
        assert cli.main(command) == 1
        assert "another process is at work on this reproduction" in capsys.readouterr().err
    finally:
        other.communicate(b"")
    assert not list(tmp_path.rglob("cell.json"))


def test_another_plan_is_refused_by_the_key_that_differs(tmp_path):
    before = {"plan": PLAN.model_dump(mode="json")}
    claim_directory(tmp_path / "out", before)
    changed = json.loads(json.dumps(before))
    changed["plan"]["settings"]["short"]["run"] = "local"
    with pytest.raises(ConfigError, match=r"holds results with plan\.settings\.short\.run='demo', found 'local'; "):
        claim_directory(tmp_path / "out", changed)
