"""Jobs run once, after the jobs that they need, end with the reproduction, and are kept if nothing changed."""

import json
import os
from pathlib import Path

import pytest

from coca_mindspeed.data.arithmetic import arithmetic_records
from coca_mindspeed.data.records import write_records
from coca_mindspeed.errors import ConfigError, DataError, TrainingError
from experiments.reproduce.job import Workplace
from experiments.reproduce.plan import Plan, jobs_of
from experiments.reproduce.provenance import check_made_from, made_from
from experiments.reproduce.scheduler import run_jobs
from tests.experiments.reproduce.jobs_for_tests import PLAN, finish

TINY = str(Path(__file__).with_name("tiny_plan.yaml"))


def note(place, job):
    """Replaces a job's work; picklable."""
    for need in job.needs:
        assert job.other(need).done(place.output), f"{job} ran before {need}"
    with (place.output / "log").open("a") as log:
        log.write(f"{job}\n")
    finish(place.output, job)
    return 1.0


def fail_at_joint(place, job):
    if job.name == "joint":
        job.directory(place.output).mkdir(parents=True)
        (job.directory(place.output) / "predictions.jsonl").write_text("half a li")
        raise DataError("failed")
    return note(place, job)


def die_at_joint(place, job):
    if job.name == "joint":
        os._exit(9)
    return note(place, job)


def log(output):
    return (output / "log").read_text().splitlines()


def test_the_jobs_of_a_plan():
    jobs = jobs_of(PLAN, [0, 1])
    assert len(jobs) == len(set(jobs)) == 2 * 9
    first = [(job.name, job.seed) for job in jobs[:4]]  # the seeds of a method are adjacent
    assert first == [("start-first", 0), ("start-first", 1), ("rlvr", 0), ("rlvr", 1)]
    names = [job.name for job in jobs if job.seed == 0]
    assert names.index("start-last") + 1 == names.index("rlcr")
    needs = {job.name: job.needs for job in jobs if job.seed == 0}
    assert needs["rlcr"] == ("start-last",)
    assert needs["coca"] == needs["majority_voting"] == ("start-first",)
    assert len({job.directory(Path("x")) for job in jobs}) == len(jobs)


@pytest.mark.parametrize("processes", [1, 2])
def test_every_job_runs_once(tmp_path, processes):
    jobs, reported = jobs_of(PLAN, [0, 1]), []
    run_jobs(Workplace(PLAN, tmp_path), jobs, processes, lambda job, seconds: reported.append(job), note)
    assert sorted(log(tmp_path)) == sorted(map(str, jobs))
    assert set(reported) == set(jobs)
    run_jobs(Workplace(PLAN, tmp_path), jobs, processes, lambda job, seconds: pytest.fail("ran again"), note)
    assert len(log(tmp_path)) == len(jobs)


@pytest.mark.parametrize(
    ("run", "error", "processes"),
    [(fail_at_joint, DataError, 1), (die_at_joint, TrainingError, 2)],
)
def test_only_failed_and_missing_jobs_run_again(tmp_path, run, error, processes):
    jobs, place = jobs_of(PLAN, [0]), Workplace(PLAN, tmp_path)
    with pytest.raises(error):
        run_jobs(place, jobs, processes, lambda job, seconds: None, run)
    assert not next(job for job in jobs if job.name == "joint").done(tmp_path)
    done, before = [str(job) for job in jobs if job.done(tmp_path)], log(tmp_path)
    run_jobs(place, jobs, 1, lambda job, seconds: None, note)
    assert all(job.done(tmp_path) for job in jobs)
    assert log(tmp_path)[: len(before)] == before
    # A job that was cut off with the one that died may have noted its name already.
    assert sorted(log(tmp_path)[len(before) :]) == sorted({*map(str, jobs)} - {*done})


def plan_on(records, *overrides):
    files = [f"data.train={records}", f"data.evaluate={records}"]
    setting = {"title": "Sums", "run": "demo", "overrides": ["data.name=records", *files, *overrides]}
    return Plan.model_validate({"title": "T", "settings": {"sums": {**setting, "trained": {"coca": ["method=coca"]}}}})


def test_results_of_other_settings_or_questions_are_refused(tmp_path):
    records, output = tmp_path / "records.jsonl", tmp_path / "out"
    write_records(records, arithmetic_records(40, "train", 0))
    plan, other = plan_on(records), plan_on(records, "optimizer.lr=0.125")
    job = next(job for job in jobs_of(plan, [0]) if job.name == "coca")

    def save(origin):
        (job.directory(output) / "cell.json").write_text(json.dumps({**summary, "made_from": origin}))

    def refused(key, of=plan):
        with pytest.raises(ConfigError, match=key):
            check_made_from(of, [job], output)

    check_made_from(plan, [job], output)  # not finished
    finish(output, job)
    check_made_from(plan, [job], output)  # of an older version
    summary, origin = job.summary(output), made_from(plan, job, output)
    save(origin)
    check_made_from(plan, [job], output)
    check_made_from(plan_on(records, "trainer.threads=1", "logging.tensorboard=false"), [job], output)
    refused(r"settings\.optimizer\.lr=.*0\.125", other)
    write_records(records, arithmetic_records(40, "train", 1))
    refused(r"questions\.evaluate=")
    records.unlink()
    check_made_from(plan, [job], output)
    changed = json.loads(json.dumps(origin))
    changed["settings"]["data"]["grader_options"] = {"tolerance": 1}
    save(changed)
    refused(r"settings\.data\.grader_options\.tolerance=1")
    changed = json.loads(json.dumps(origin))
    del changed["settings"]["optimizer"]["lr"]  # a key that the older version did not have
    save(changed)
    check_made_from(other, [job], output)
