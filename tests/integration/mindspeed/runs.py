"""Starting the driver as users do, and reading what a run leaves behind."""

import json
import shutil
import subprocess
import sys

import pytest

from coca_mindspeed.evaluation.predictions import VALIDATIONS, read_predictions, validation_files
from tests.integration.mindspeed import tiny
from tests.integration.mindspeed.environment import REPOSITORY, environment
from tests.support.waiting import until

DRIVER = "tests.integration.mindspeed.driver"
BUSY_SECONDS = 600  # of a busy machine, for what takes some seconds


def start_driver(directory, config, ray_directory, *, module=DRIVER, python=sys.executable, **variables):
    """Start the driver, or a module that is called like it, on ``config``, its output appended to ``directory/log``."""
    path = tiny.write_configuration(directory / "run.yaml", config)
    with (directory / "log").open("ab") as log:
        return subprocess.Popen(
            [python, "-m", module, str(path)],
            cwd=REPOSITORY,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment(RAY_TMPDIR=ray_directory, **variables),
        )


def finish(process, directory, timeout=900):
    """Wait for a run; its log, and a failed test if it failed."""
    try:
        code = process.wait(timeout=timeout)
    finally:
        process.kill()
    log = (directory / "log").read_text(errors="replace")
    if code:
        pytest.fail(f"the run returned {code}; the end of its log:\n{log[-4000:]}")
    return log


def wait_for_checkpoint(process, marker):
    """Wait until a run has a checkpoint, by the file that names the newest, or has ended."""
    until(lambda: marker.exists() or process.poll() is not None, 900)


def json_lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def metrics_of(directory, name="metrics.jsonl"):
    """The lines of a file that a run of :func:`start_driver` wrote."""
    return json_lines(directory / "output" / name)


def copy_of(warm, target):
    """A run's own copy of a warmed-up folder."""
    shutil.copytree(warm, target, dirs_exist_ok=True)
    return target


def going_on(config, directory):
    """The run file of a run that goes on from its own last checkpoint."""
    resume = {"load": str(directory / "checkpoints"), "finetune": False, "no_load_optim": False, "no_load_rng": False}
    return {**config, "actor_config": {**config["actor_config"], **resume}}


def run_and_check(warm, directory, ray_directory, changes, **start):
    """Three iterations with validation and samples, from a copy of a warmed-up folder; what each must have left.

    Returns:
        The lines of ``metrics.jsonl``.
    """
    copy_of(warm, directory)
    questions = directory / "train.jsonl"
    questions.write_text("".join(questions.read_text().splitlines(keepends=True)[:24]))  # iterations ask 16 of them
    validated = {"samples_interval": 2, "eval_interval": 2, "eval_data": str(directory / "eval.jsonl")}
    config = tiny.configuration(
        directory,
        **{
            **changes,
            "megatron_training": {"train_iters": 3, **changes.get("megatron_training", {})},
            "coca": {**validated, "samples_prompts": 16, **changes.get("coca", {})},
        },
    )
    log = finish(start_driver(directory, config, ray_directory, **start), directory)
    rows = metrics_of(directory)
    assert [row["step"] for row in rows] == [1, 2, 3]
    for row in rows:
        assert 0 < row["actor/grad_norm"] < float("inf")
        assert row["actor/max_memory_allocated_gib"] == 0  # the CPU shim's answer
        assert row["rollout/log_prob_gap"] < 1e-4
        assert -1 <= row["reward/confidence"] <= 0
        assert 0 <= row["reward/answer"] < 1
        assert row["seconds/grading"] > 0
        tokens = row["update_tps"] * row["timing/update"]
        assert row["e2e_tps"] * (row["timing/all"] - row["seconds/between_iterations"]) == pytest.approx(tokens)
    validations = metrics_of(directory, "validation.jsonl")
    assert [row["step"] for row in validations] == [0, 2, 3]
    assert all(0 <= row["held_out/accuracy"] <= 1 for row in validations)
    written = validation_files(directory / "output" / VALIDATIONS)
    assert [*written] == [0, 2, 3]
    for row, file in zip(validations, written.values(), strict=True):
        correct = [prediction.correct for prediction in read_predictions(file)]
        assert len(correct) == len(json_lines(directory / "eval.jsonl")) * config["rl_config"]["n_samples_per_prompt"]
        assert sum(correct) / len(correct) == pytest.approx(row["eval/accuracy"])
    first, samples = (json_lines(directory / "output" / "samples" / f"iteration_{step:06d}.jsonl") for step in (1, 2))
    assert len(samples) == 16 * 8
    assert {"prompt", "response", "confidence", "gesr", "answer_advantage"} <= set(samples[0])
    assert [row["rollout/times_asked"] for row in rows] == pytest.approx([1, 32 / 24, 2])
    asked = {row["prompt"] for row in first}
    for name, again in (("first_sight", False), ("repeated", True)):
        correct = [
            row["correct"] for row in samples if (row["prompt"] in asked) == again and row["confidence"] is not None
        ]
        assert rows[1][f"{name}/accuracy"] == pytest.approx(sum(correct) / len(correct))
        assert (f"{name}/accuracy" in rows[0], f"{name}/accuracy" in rows[2]) == (not again, again)
    assert "reward/confidence" in log  # MindSpeed-RL's own logger shows it
    return rows
