"""Plans are validated, and questions that cannot be graded are refused before the first job."""

from pathlib import Path

import pytest
import yaml

from coca_mindspeed.algorithm.methods import METHODS
from coca_mindspeed.config.compose import compose_run
from coca_mindspeed.data.records import Record, write_records
from coca_mindspeed.errors import ConfigError
from experiments.__main__ import main
from experiments.reproduce import scheduler
from experiments.reproduce.plan import Plan, jobs_of, plan_path, read_plan, run_config
from experiments.reproduce.questions import missing_sets

SUM = Record("a", "sums", "math", "1+1", "2")


def plan_of(*overrides, **setting):
    own = {"title": "S", "run": "demo", "trained": {}, "baselines": ["instruct"], "overrides": [*overrides], **setting}
    return Plan.model_validate({"title": "T", "settings": {"s": own}, "train_questions": 100, "evaluate_questions": 8})


def with_records(directory, *overrides, records=(SUM,), **setting):
    for name in ("train", "evaluate"):
        write_records(directory / f"{name}.jsonl", records)
    named = [f"data.{name}={directory}/{name}.jsonl" for name in ("train", "evaluate")]
    return plan_of("data.name=records", "data.grader=auto", *named, *overrides, **setting)


def reproduce(plan, directory):
    file = directory / "plan.yaml"
    file.write_text(plan.model_dump_json())
    return main(["reproduce", "--plan", str(file), "--seeds", "1", "--jobs", "1", "--output", str(directory / "out")])


@pytest.mark.parametrize("name", ["methods", "methods_lr"])
def test_the_plans_of_all_methods_have_an_equal_budget(name):
    (setting,) = read_plan(plan_path(name)).settings.values()
    runs = [run_config(setting, own, 0) for own in setting.trained.values()]
    assert {run.method.label for run in runs} == {*METHODS}
    assert {run.total_steps for run in runs} == {150}


def test_built_in_plans():
    names = {job.name for job in jobs_of(read_plan(plan_path("miniature")), [0])}
    assert names >= {"instruct", "rlvr", "coca", "joint", "sequential", "rlcr", "majority_voting"}
    assert names >= {"rlvr+question_prob", "rlvr+probe", "rlvr+assessor"}
    whole = read_plan(plan_path("smollm2"))
    runs = {name: run_config(whole.settings["real"], own, 0) for name, own in whole.settings["real"].trained.items()}
    assert {(run.rollout.prompts * run.rollout.group_size, run.trainer.steps) for run in runs.values()} == {(96, 150)}
    assert {job.seed for job in jobs_of(whole, range(whole.first_seed, whole.first_seed + 2))} == {2, 3}
    sets = missing_sets(whole, Path("none"))["real"]
    trained = [record.category == "trained" for record in sets["evaluate"]]
    assert trained == sorted(trained, reverse=True)
    assert sum(trained) == runs["coca"].evaluation.questions == runs["coca"].evaluation.final_questions
    assert len({record.question for record in sets["train"]}) >= 150 * runs["coca"].rollout.prompts
    assert sum(r.dataset in ("additions", "differences") for r in sets["train"]) <= len(sets["train"]) / 3
    # The demo has the settings of the comparison, for fewer steps and with less memory.
    demo, coca = compose_run("experiments/demo_real.yaml").run, runs["coca"]
    assert demo.rollout.model_copy(update={"batch_responses": coca.rollout.batch_responses}) == coca.rollout
    assert (demo.method, demo.optimizer) == (coca.method, coca.optimizer)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"baselines": ["rlvr+probe"]}, r"s: rlvr\+probe"),
        ({"baselines": ["instruct", "instruct"]}, "baselines: instruct"),
        ({"trained": {"coca, x": [], "coca_x": []}}, "'coca_x' and 'coca, x'"),
        ({"trained": {"rlvr+probe": []}}, r"'rlvr\+probe'"),
        ({"trained": {",": []}}, "trained: ''"),
        ({"miniature": "short", "real_world": {}}, "'miniature' and 'real_world'"),
        ({"miniature": "short", "overrides": ["data.train=mine.jsonl"]}, r"s: data\.train=mine"),
        ({"miniature": "short", "trained": {"coca": ["data.grader=math"]}}, r"data\.grader=math"),
    ],
)
def test_settings_are_validated(change, message):
    with pytest.raises(ValueError, match=message):
        plan_of(**{"overrides": [], **change})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (yaml.safe_dump({"title": "T", "settings": {}, "paper_setting": "qwen2.5-7b"}), "paper_setting=.*qwen2.5-7b'"),
        (yaml.safe_dump({"settings": {}}), "title"),
        ("title: [", "YAML"),
        *(
            (
                yaml.safe_dump({"title": "T", "settings": {name: {"title": "S", "run": "demo", "trained": {}}}}),
                "settings",
            )
            for name in ("report", "settings.json", "a/b", "..", "")
        ),
    ],
)
def test_plan_files_are_validated(tmp_path, content, message):
    (tmp_path / "plan.yaml").write_text(content)
    with pytest.raises(ConfigError, match=message):
        read_plan(tmp_path / "plan.yaml")


UNGRADABLE = [
    (["data.grader_options={math: {second: 5}}"], {}, "'second'"),
    ([], {"records": [SUM, Record("c", "sums", "math", "1+1", r"\frac{1")]}, "train.jsonl:2"),
    (["data.grader=exact"], {"records": [SUM, Record("b", "sums", "code", "1+1", "2")]}, "'code'"),
    (["data.evaluate=no.jsonl"], {}, "no.jsonl"),
    ([], {"trained": {"rlvr": ["method=rlvr"], "coca": ["data.evaluate={}/train.jsonl"]}}, "setting 's', coca"),
]


@pytest.mark.parametrize(("overrides", "changed", "message"), UNGRADABLE)
def test_questions_are_checked_before_the_first_job(tmp_path, monkeypatch, capsys, overrides, changed, message):
    monkeypatch.setattr(scheduler.run_jobs, "__defaults__", (lambda *_: pytest.fail("a job ran"),))
    if "trained" in changed:
        trained = {name: [o.format(tmp_path) for o in listed] for name, listed in changed["trained"].items()}
        changed = {"trained": trained, "baselines": []}
    assert reproduce(with_records(tmp_path, *overrides, **changed), tmp_path) == 1
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()  # the directory must not be claimed for a plan that has to change
