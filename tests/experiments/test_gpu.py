"""Trainings in slices: a slice that ends is continued, and the last one writes report and profile."""

import json
import signal

from experiments.__main__ import main
from experiments.reproduce.plan import jobs_of, plan_path, read_plan, run_config
from tests.experiments.reproduce.test_end_to_end import real_world_plan


def test_the_plan_differs_from_that_of_the_comparison_in_its_forms_alone():
    ours, theirs = read_plan(plan_path("smollm2_forms")), read_plan(plan_path("smollm2"))
    assert ours.settings["real"].real_world == theirs.settings["real"].real_world
    rlcr = [run_config(plan.settings["real"], plan.settings["real"].trained["rlcr"], 2) for plan in (ours, theirs)]
    assert rlcr[0].method == rlcr[1].method
    assert rlcr[0].rollout == rlcr[1].rollout
    assert rlcr[0].optimizer == rlcr[1].optimizer
    assert [job.name for job in jobs_of(ours, [2, 3]) if job.kind == "trained"][::2] == [*ours.settings["real"].trained]


def test_a_missing_model_is_named_before_torch_is_imported(tmp_path, capsys):
    plan = tmp_path / "plan.yaml"
    plan.write_text(plan_path("smollm2_forms").read_text().replace("models/smollm2", "models/none"))
    assert main(["gpu", "--plan", str(plan), "--output", str(tmp_path / "out")]) == 2
    assert "model.path=models/none" in capsys.readouterr().err


def test_slices_to_the_end(tmp_path, monkeypatch):
    monkeypatch.setattr("experiments.reproduce.report.save_figure", lambda *_: None)
    plan, output = real_world_plan(tmp_path), tmp_path / "out"
    command = ["gpu", "--plan", str(plan), "--output", str(output)]
    assert main([*command, "--prepare"]) == 0
    assert (output / "real" / "tasks" / "evaluate.jsonl").is_file()
    assert not (output / "real" / "seed_2").exists()
    slices = iter(range(1, 12))
    with monkeypatch.context() as patch:  # slices of 2, 4, 8, ... seconds, so that each machine comes to an end
        patch.setattr(
            signal, "alarm", lambda seconds: signal.setitimer(signal.ITIMER_REAL, seconds and 2 ** next(slices))
        )
        while not (output / "profile.json").exists():
            assert main(command) == 0
    assert next(slices) > 2
    profile = json.loads((output / "profile.json").read_text())
    assert len(profile["update_seconds"]) == 3
    assert profile["kernels"][0]["milliseconds"] > 0
    assert profile["peak_bytes"] is None
    assert profile["estimated_bytes"]["update"] > 0
    assert "rlcr" in (output / "report" / "README.md").read_text()
