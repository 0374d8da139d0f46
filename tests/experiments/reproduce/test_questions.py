"""What a plan says of its data reaches every cell, and what cannot be graded is refused before any of them runs."""

import json
from pathlib import Path

import pytest

from coca_mindspeed.data.records import Record, read_records, write_records
from coca_mindspeed.errors import ConfigError
from coca_mindspeed.grading.verdict import Outcome
from experiments.__main__ import main
from experiments.reproduce import work, work_queue
from experiments.reproduce.cells import ReproductionCell, cells_of
from experiments.reproduce.plan import Plan, read_plan
from experiments.reproduce.questions import cell_config, missing_sets, write_sets
from experiments.reproduce.work import Workplace, run_cell
from tests.experiments.reproduce.cells_for_tests import finish

SUM = Record("a", "sums", "math", "1+1", "2")


def plan_of(*overrides: str, **setting) -> Plan:
    own = {"title": "S", "run": "demo", "trained": {}, "baselines": ["instruct"], "overrides": [*overrides], **setting}
    return Plan.model_validate({"title": "T", "settings": {"s": own}, "train_questions": 100, "evaluate_questions": 8})


def with_records(directory: Path, *overrides: str, records=(SUM,), **setting) -> Plan:
    for name in ("train", "evaluate"):
        write_records(directory / f"{name}.jsonl", records)
    named = [f"data.{name}={directory}/{name}.jsonl" for name in ("train", "evaluate")]
    return plan_of("data.name=records", "data.grader=auto", *named, *overrides, **setting)


def reproduce(plan: Plan, directory: Path) -> int:
    file = directory / "plan.yaml"
    file.write_text(plan.model_dump_json())
    return main(["reproduce", "--plan", str(file), "--seeds", "1", "--jobs", "1", "--output", str(directory / "out")])


@pytest.mark.parametrize("embedded", [{"miniature": "short"}, {"real_world": {"train": 2, "evaluate": 2}}])
def test_overrides_of_the_data_hold_for_embedded_questions_too(tmp_path, embedded):
    options = "data.grader_options={math: {seconds: 7}}"
    plan = plan_of("data.epochs=2", "data.require_evaluated=false", options, trained={"coca": []}, **embedded)
    for cell in cells_of(plan, [0]):
        data = cell_config(plan, cell, tmp_path).data
        assert (data.epochs, data.require_evaluated) == (2, False)
        assert data.grader_options == {"math": {"seconds": 7}}
        assert (data.name, data.grader) == ("records", "auto")  # demo's own arithmetic is graded by "exact"
        assert data.train == str(tmp_path / "s" / "tasks" / "train.jsonl")


@pytest.mark.parametrize(
    "override", ["data.train=mine.jsonl", "++data.evaluate=mine.jsonl", "data.grader=math", "data.train_size=9"]
)
def test_an_override_that_embedded_questions_would_put_aside_is_refused(override):
    for where in ({"overrides": [override]}, {"trained": {"coca": [override]}}):
        with pytest.raises(ValueError, match=r"s: .*data\..*: has no effect"):
            plan_of(miniature="short", **where)
    plan_of("data.train=set-by-the-plan", "data.grader=auto", miniature="short")
    plan_of(override)


def test_questions_are_written_once_the_evaluations_last(tmp_path):
    plan = plan_of(miniature="short")
    missing = missing_sets(plan, tmp_path)
    assert list(missing["s"]) == ["warm_up", "train", "evaluate"]
    assert not list(tmp_path.iterdir())
    write_sets(missing, tmp_path)
    for part, records in missing["s"].items():
        assert list(read_records(tmp_path / "s" / "tasks" / f"{part}.jsonl")) == list(records)
    assert missing_sets(plan, tmp_path) == {}


@pytest.mark.parametrize(("options", "outcome"), [("{}", Outcome.RIGHT), ("{math: {boxed_only: true}}", Outcome.WRONG)])
def test_baselines_are_graded_with_the_graders_options(tmp_path, monkeypatch, options, outcome):
    plan = with_records(tmp_path, f"data.grader_options={options}")
    found = []

    def graded(name, subject, records, *_, **__):
        found.extend(subject.grader.grade(records, ["the answer is 2"]))
        return []

    monkeypatch.setattr(work, "load_policy", lambda *_, **__: None)
    monkeypatch.setattr(work, "run_baseline", graded)
    run_cell(Workplace(plan, tmp_path / "out"), ReproductionCell("s", 0, "instruct", "instruct"))
    assert [verdict.outcome for verdict in found] == [outcome]


@pytest.mark.parametrize(
    ("overrides", "records", "message"),
    [
        (["data.grader_options={math: {second: 5}}"], [SUM], "did you mean 'seconds'?"),
        ([], [SUM, Record("b", "mine", "poetry", "1+1", "2")], "'b' of 'mine': grader of category 'poetry'"),
        (["data.grader=math"], [Record("c", "sums", "math", "1+1", " ")], "record 'c' of 'sums': the gold answer"),
        ([], [SUM, Record("c", "sums", "math", "1+1", r"\frac{1")], "train.jsonl:2: record 'c' of 'sums'"),
        (["data.evaluate=null"], [SUM], "setting 's', instruct: data.evaluate names no held-out questions"),
        (
            ["data.grader=exact"],
            [SUM, Record("b", "sums", "code", "1+1", "2")],
            "'b' of 'sums' is of category 'code'",
        ),
        (["data.evaluate=no.jsonl"], [SUM], "no.jsonl: cannot be read"),
    ],
)
def test_what_cannot_be_graded_is_refused_before_any_cell_runs(
    tmp_path, monkeypatch, capsys, overrides, records, message
):
    monkeypatch.setattr(work_queue.run_cells, "__defaults__", (lambda *_: pytest.fail("a cell was run"),))
    assert reproduce(with_records(tmp_path, *overrides, records=records), tmp_path) == 1
    assert message in capsys.readouterr().err
    # The plan has to be changed, so the directory must not be this plan's yet.
    assert not (tmp_path / "out").exists()


def test_methods_measured_on_other_questions_are_refused(tmp_path, capsys):
    trained = {"rlvr": ["method=rlvr"], "coca": [f"data.evaluate={tmp_path}/train.jsonl"]}
    assert reproduce(with_records(tmp_path, trained=trained, baselines=[]), tmp_path) == 1
    assert "setting 's', coca: its overrides of data.* name other held-out questions" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_options_for_embedded_questions_are_checked_before_they_are_written(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(work_queue.run_cells, "__defaults__", (lambda *_: pytest.fail("a cell was run"),))
    assert reproduce(plan_of("data.grader_options={exact: {x: 1}}", miniature="short"), tmp_path) == 1
    assert "unknown option of the grader 'exact' 'x'" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_what_is_finished_is_not_checked_again(tmp_path, capsys):
    plan = with_records(tmp_path)
    file = tmp_path / "plan.yaml"
    file.write_text(plan.model_dump_json())
    for cell in cells_of(read_plan(file), [0]):
        finish(tmp_path / "out", cell)
    (tmp_path / "out" / "settings.json").write_text(json.dumps({"plan": plan.model_dump(mode="json")}))
    (tmp_path / "train.jsonl").unlink()
    assert reproduce(plan, tmp_path) == 0
    assert "0 to run" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"trained": {"coca, x": [], "coca_x": []}}, r"'coca_x': its directory would be 'coca_x' as that of 'coca, x'"),
        ({"trained": {"coca x": [], "coca, x": []}}, r"'coca, x': its directory would be 'coca_x' as that of 'coca x'"),
        ({"trained": {"instruct": []}}, r"'instruct': its directory would be 'instruct' as that of 'instruct'"),
        ({"trained": {"majority voting": []}}, r"'majority voting': its directory would be 'majority_voting'"),
        ({"trained": {"start-first": []}}, r"'start-first': its directory"),
        ({"trained": {"coca/run": []}}, r"'coca/run': cannot be the name of a directory"),
        ({"trained": {"..": []}}, r"'\.\.': cannot be the name of a directory"),
        ({"trained": {",": []}}, r"'': cannot be the name of a directory"),
        ({"baselines": ["instruct", "instruct"]}, r"baselines: instruct is there twice"),
    ],
)
def test_cells_that_would_share_a_directory_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        plan_of(**change)


@pytest.mark.parametrize("name", ["report", "settings.json", "a/b", "..", ""])
def test_a_setting_has_a_directory_of_its_own(name):
    setting = {"title": "S", "run": "demo", "trained": {}}
    with pytest.raises(ValueError, match="settings"):
        Plan.model_validate({"title": "T", "settings": {name: setting}})


def test_an_unknown_setting_of_the_paper_is_refused(tmp_path):
    content = {"title": "T", "settings": {}, "paper_setting": "qwen2.5-7b"}
    (tmp_path / "plan.yaml").write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=r"paper_setting: .*no setting 'qwen2\.5-7b'; it has qwen2\.5-7b/math"):
        read_plan(tmp_path / "plan.yaml")
