"""recipes/: scripts that `check` accepts, and the acceptance table that a run fills."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from coca_mindspeed.config.compose import find_verl_run
from coca_mindspeed.upstream.manifest import load_manifests
from coca_mindspeed.verl.checks import verl_problems
from coca_mindspeed.verl.plan import verl_configuration
from coca_mindspeed.verl.settings import verl_settings
from recipes import acceptance

RECIPES = Path(__file__).parents[1] / "recipes"
ENGINES = ("verl_ascend", "mindspeed_rl")


@pytest.mark.usefixtures("verls_keys")
@pytest.mark.parametrize("model", ["1p5b", "7b"])
def test_verls_configuration_is_not_refused_on_four_npus(model, tmp_path):
    """Our checks accept the arguments that the script gives to verl; a python3 of the test's records them."""
    recorded = tmp_path / "arguments"
    python = tmp_path / "python3"
    python.write_text(f'#!/bin/bash\n[[ $1 == -c ]] && echo CONFIGS || printf "%s\\n" "$@" > {recorded}\n')
    python.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "MODEL": model, "OUTPUT": str(tmp_path / "out")}
    script = RECIPES / "verl_ascend" / "run_coca_qwen2.5_npu.sh"
    subprocess.run(["bash", str(script), "coca.method.name=joint"], env=environment, check=True)
    module, name, *overrides = [
        recorded.read_text().splitlines()[i] for i in (1, 5)
    ] + recorded.read_text().splitlines()[6:]
    assert (module, name) == ("verl.trainer.main_ppo", f"coca_qwen25_{model}")
    config = verl_configuration(find_verl_run(name), overrides)
    settings = verl_settings(config)
    assert settings.method.name == "joint"
    assert verl_problems(config, settings) == []
    assert (config["trainer"]["n_gpus_per_node"], config["trainer"]["total_training_steps"]) == (4, 100)
    subprocess.run(["bash", str(script), "--dry-run", "coca.method.name=joint"], env=environment, check=True)
    assert recorded.read_text().splitlines() == ["-m", "coca_mindspeed.cli", "check", name, *overrides]


@pytest.mark.parametrize("engine", ENGINES)
def test_another_model_is_refused_by_name(engine):
    script = RECIPES / engine / "run_coca_qwen2.5_npu.sh"
    refused = subprocess.run(["bash", str(script)], env={**os.environ, "MODEL": "qwen"}, capture_output=True, text=True)
    assert (refused.returncode, "MODEL=qwen" in refused.stderr) == (2, True)


def write_run(directory, engine, **changes):
    """The files of a good run of 100 steps; ``changes`` replace metrics of every step."""
    metrics = {"reward/confidence": -0.2, "reward/answer": 0.5, "rollout/ece": 0.1, "actor/pg_loss": 0.01}
    for segment in ("confidence", "answer"):
        metrics |= {f"{segment}/clip_fraction": 0.0, f"{segment}/kl": 1e-5}
    metrics |= {"perf/throughput": 200.0, "e2e_tps": 200.0, "actor/max_memory_allocated_gib": 41.5}
    metrics |= {"actor/perf/max_memory_allocated_gb": 41.5, **changes}
    steps = [{"step": i, **({"data": metrics} if engine == "verl_ascend" else metrics)} for i in range(1, 101)]
    group = [
        {"correct": c, "confidence_advantage": s, "answer_advantage": s}
        for c, s in ((True, 0.5**0.5), (False, -(0.5**0.5)))
    ]
    alike = [{"correct": True, "confidence_advantage": 0.0, "answer_advantage": 0.0}] * 2
    samples = [{"prompt": str(number), **row} for number, rows in enumerate((group, alike)) for row in rows]
    place, name = (directory, "step") if engine == "verl_ascend" else (directory / "stage0", "iteration")
    (place / "samples").mkdir(parents=True)
    (place / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in steps))
    (place / "samples" / f"{name}_000001.jsonl").write_text("".join(json.dumps(row) + "\n" for row in samples))
    (directory / "logs").mkdir()
    for start in range(2):
        (directory / "logs" / f"{start}.log").touch()
    return directory


@pytest.mark.parametrize("engine", ENGINES)
def test_a_run_fills_the_table_of_the_readme(engine, tmp_path):
    readme = tmp_path / "README.md"
    readme.write_text(before := (RECIPES / engine / "README.md").read_text())
    assert acceptance.table(None)[0] in before  # the shipped one is empty, and up to date
    assert acceptance.main([str(write_run(tmp_path / "run", engine)), "--into", str(readme)]) == 0
    after = readme.read_text()
    assert "FAILED" not in after
    assert "| 41.5 (most 41.5) |" in after
    assert after.partition(acceptance.BEGIN)[0] == before.partition(acceptance.BEGIN)[0]
    assert after.partition(acceptance.END)[2] == before.partition(acceptance.END)[2]


@pytest.mark.parametrize(
    ("changes", "failed"),
    [
        ({"confidence/clip_fraction": 0.1}, 1),
        ({"answer/kl": 0.5}, 1),
        ({"actor/pg_loss": float("nan")}, 1),
        ({"actor/pg_loss": None, "answer/kl": None}, 2),
    ],
)
def test_what_a_run_violates_fails(changes, failed, tmp_path, capsys):
    assert acceptance.main([str(write_run(tmp_path / "run", "verl_ascend", **changes))]) == 1
    assert capsys.readouterr().out.count("FAILED") == failed


@pytest.mark.parametrize("broken", ["samples", "steps", "starts"])
def test_missing_steps_samples_and_starts_fail(broken, tmp_path, capsys):
    run = write_run(tmp_path / "run", "mindspeed_rl")
    if broken == "samples":
        file = run / "stage0" / "samples" / "iteration_000001.jsonl"
        file.write_text(file.read_text().replace('"answer_advantage": 0.7', '"answer_advantage": 0.9'))
    elif broken == "steps":
        file = run / "stage0" / "metrics.jsonl"
        file.write_text("".join(file.read_text().splitlines(keepends=True)[:-1]))
    else:
        (run / "logs" / "1.log").unlink()
    assert acceptance.main([str(run)]) == 1
    assert capsys.readouterr().out.count("FAILED") == 1


def test_the_image_of_the_first_trial():
    """Its requirements are files of the repository, its verl that of the manifest; the page names a run."""
    lines = (RECIPES / "verl_qwen3" / "Dockerfile").read_text().splitlines()
    assert [line for line in lines if line.startswith(("ARG", "FROM"))] == ["ARG IMAGE", "FROM ${IMAGE}"]
    words = " ".join(lines).split()
    assert all((RECIPES.parent / words[at + 1]).is_file() for at, word in enumerate(words) if word == "-r")
    assert f"verl=={load_manifests('verl')[-1].release}" in words
    assert find_verl_run("coca_qwen3_0p6b") is not None
    assert "launch/verl.sh coca_qwen3_0p6b --trial" in (RECIPES / "verl_qwen3" / "README.md").read_text()
