"""Whole reproductions of a few steps: one that is interrupted and continued, one with a pretrained model."""

import csv
from pathlib import Path

import yaml

from coca_mindspeed.data.records import read_records
from coca_mindspeed.evaluation.predictions import read_predictions
from experiments.__main__ import main
from experiments.reproduce import scheduler
from experiments.reproduce.plan import jobs_of, plan_path, read_plan
from tests.local.models_for_tests import write_random_model

PLAN = Path(__file__).with_name("tiny_plan.yaml")


def finish_times(jobs, output):
    return {job: (job.directory(output) / "cell.json").stat().st_mtime_ns for job in jobs if job.done(output)}


def test_the_miniature(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("experiments.reproduce.report.save_figure", lambda *_: None)  # takes seconds
    output, report = tmp_path / "out", tmp_path / "report"
    command = ["reproduce", "--plan", str(PLAN), "--seeds", "1", "--jobs", "1"]
    command += ["--output", str(output), "--report", str(report)]
    jobs = jobs_of(read_plan(PLAN), [0])
    run_job = scheduler.run_job

    def stop_at_joint(place, job):
        if job.name == "joint":
            raise KeyboardInterrupt
        return run_job(place, job)

    monkeypatch.setattr(scheduler.run_jobs, "__defaults__", (stop_at_joint,))
    assert main(command) == 130
    done = finish_times(jobs, output)
    assert 0 < len(done) < len(jobs)
    monkeypatch.setattr(scheduler.run_jobs, "__defaults__", (run_job,))
    assert main(command) == 0
    assert all(job.done(output) for job in jobs)
    assert done.items() <= finish_times(jobs, output).items()

    predictions = {job.name: job.predictions(output) for job in jobs if job.setting == "short" and job.kind != "start"}
    answers = [(p.id, p.response, p.correct) for p in predictions["rlvr"]]
    for name in ("rlvr+question_prob", "rlvr+probe", "rlvr+assessor"):  # RLVR's answers, another confidence
        assert [(p.id, p.response, p.correct) for p in predictions[name]] == answers
        assert {p.method for p in predictions[name]} == {name}
    assert {p.category for p in predictions["coca"]} == {"math", "code", "factual"}
    tables = {"short_main", "short_answer_first", "long_main"}
    tables |= {f"{s}_{name}" for s in ("short", "long") for name in ("segment_against_joint", "samples")}
    assert {"claims", *tables} <= {path.stem for path in report.glob("*.csv")}
    with (report / "short_main.csv").open() as file:
        methods = {row["method"] for row in csv.DictReader(file)}
    assert methods == {"instruct", "rlvr", "rlvr+question_prob", "rlvr+probe", "rlvr+assessor", "coca"}

    assert main([*command[:-4], "--output", str(output), "--report-only", "--seeds", "2"]) == 0
    assert "seed 1, coca" in (output / "report" / "README.md").read_text()
    other = tmp_path / "other.yaml"
    other.write_text(PLAN.read_text().replace("samples: 3", "samples: 4"))
    assert main(["reproduce", "--plan", str(other), "--output", str(output), "--report-only"]) == 1
    assert "plan.samples=3" in capsys.readouterr().err


def real_world_plan(directory):
    """The SmolLM2 plan on a random model, with few questions and two steps."""
    write_random_model(directory / "model", "llama")
    plan = yaml.safe_load(plan_path("smollm2").read_text(encoding="utf-8"))
    setting = plan["settings"]["real"]
    setting["real_world"] = {"train": 8, "evaluate": 2, "warm_up": 4}
    setting["trained"] = {
        name: ["evaluation.interval=1" if key.startswith("evaluation.interval") else key for key in own]
        for name, own in setting["trained"].items()
        if name in ("coca", "rlcr")  # confidence first and last
    }
    setting["overrides"] += [
        *(f"model.path={directory}/model", "warm_up.steps=3", "warm_up.batch=4"),
        *("warm_up.lr=0.001", "rollout.prompts=4", "rollout.group_size=4", "rollout.max_prompt_tokens=480"),
        *("rollout.max_new_tokens=32", "trainer.steps=2", "trainer.device=cpu", "trainer.threads=1"),
        *(f"evaluation.{key}" for key in ("questions=6", "final_questions=6", "samples=2")),
    ]
    plan |= {"samples": 2, "predictor_questions": 30}
    (directory / "plan.yaml").write_text(yaml.safe_dump(plan))
    return directory / "plan.yaml"


def test_a_pretrained_model(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("experiments.reproduce.report.save_figure", lambda *_: None)
    plan, output, report = real_world_plan(tmp_path), tmp_path / "out", tmp_path / "report"
    command = ["reproduce", "--plan", str(plan), "--seeds", "1", "--jobs", "1", "--output", str(output)]
    assert main([*command, "--report", str(report)]) == 0
    jobs = jobs_of(read_plan(plan), [2])
    names = {"start-first", "start-last", "coca", "rlcr", "instruct", "coca+family_mean", "majority_voting"}
    assert {job.name for job in jobs} == names
    assert all(job.done(output) for job in jobs)
    evaluate = {r.id: r for r in read_records(output / "real" / "tasks" / "evaluate.jsonl")}
    assert {r.category for r in evaluate.values()} == {"trained", "near", "far"}
    for job in jobs:
        if job.kind == "start":
            assert (job.directory(output) / "warm_start" / "config.json").is_file()
            continue
        assert {p.id for p in read_predictions(job.directory(output) / "predictions.jsonl")} == set(evaluate)
        if job.kind == "trained":
            config = yaml.safe_load((job.directory(output) / "run" / "config.yaml").read_text())
            last = "last" if job.name == "rlcr" else "first"
            assert config["model"]["path"].endswith(f"start-{last}/warm_start")
            assert config["warm_up"]["records"] is None  # the warm-up runs once, in the start
    with (report / "claims.csv").open() as file:
        claims = [row["claim"] for row in csv.DictReader(file)]
    for category in ("trained", "near", "far"):
        assert any(f"real world, {category}: coca has a lower ECE than instruct" in claim for claim in claims)
    with (report / "real_learning_curves.csv").open() as file:
        steps = [(row["method"], float(row["step"])) for row in csv.DictReader(file)]
    assert [step for method, step in steps if method == "coca"] == [0, 1, 2]
    with (report / "real_discrimination.csv").open() as file:
        rows = {row[""]: row for row in csv.DictReader(file)}
    assert set(rows) == {job.name for job in jobs if job.kind != "start"}
    assert rows["coca+family_mean"]["within"] in ("", "0.5")
    times = finish_times(jobs, output)
    assert main(command) == 0
    assert "0 to run" in capsys.readouterr().out
    assert finish_times(jobs, output) == times
