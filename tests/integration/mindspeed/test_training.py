"""The whole loop of MindSpeed-RL's ``train``, hooked, over Ray and gloo: it runs, it learns, it fails loudly.

Every test starts the driver as users do, with a tiny model on the host platform.  None of this touches an NPU.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.mindspeed import tiny
from tests.integration.mindspeed.environment import REPOSITORY, environment, needs_mindspeed

pytestmark = [*needs_mindspeed, pytest.mark.slow, pytest.mark.timeout(1800)]

MASTER = "MINDSPEED_RL_MASTER_HOME"
LEARNING_ITERATIONS = 100


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a warmed-up model and questions; copied for every run."""
    directory = tmp_path_factory.mktemp("warm")
    (directory / "model").mkdir()
    tiny.write_model(directory / "model", warm_up_steps=300)
    tiny.write_questions(directory)
    return directory


@pytest.fixture
def ray_directory() -> Iterator[str]:
    """Ray's sockets need a short path of their own."""
    directory = Path(f"/tmp/coca-ray-{os.getpid()}")
    yield str(directory)
    shutil.rmtree(directory, ignore_errors=True)


def _start(directory: Path, config: dict[str, Any], ray_directory: str, **variables: str) -> subprocess.Popen[bytes]:
    path = tiny.write_configuration(directory / "run.yaml", config)
    with (directory / "log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "coca_mindspeed.mindspeed.driver", str(path)],
            cwd=REPOSITORY,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment(RAY_TMPDIR=ray_directory, **variables),
        )


def _finish(process: subprocess.Popen[bytes], directory: Path, timeout: float = 900) -> str:
    """Wait for the driver; its log, and a failure if it failed."""
    try:
        code = process.wait(timeout=timeout)
    finally:
        process.kill()
    log = (directory / "log").read_text(errors="replace")
    if code:
        pytest.fail(f"the driver returned {code}; the end of its log:\n{log[-4000:]}")
    return log


def _metrics(directory: Path, name: str = "metrics.jsonl") -> list[dict[str, float]]:
    return [json.loads(line) for line in (directory / "output" / name).read_text().splitlines()]


def _copy(warm: Path, target: Path) -> Path:
    shutil.copytree(warm, target, dirs_exist_ok=True)
    return target


LAYOUTS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "TP1": (1, {}, {}),
    "TP2": (2, {"tensor_model_parallel_size": 2}, {"guarantee_order": True}),
    "PP2": (2, {"pipeline_model_parallel_size": 2}, {"mini_batch_size": 8}),
    "DP2": (2, {"micro_batch_size": 16}, {"adv_dispatch_size": 32, "reward_dispatch_size": 64}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_loop_runs_at(layout: str, warm: Path, tmp_path: Path, ray_directory: str) -> None:
    npus, actor, rl = LAYOUTS[layout]
    _run_and_check(warm, tmp_path, ray_directory, npus, actor, rl)


def _run_and_check(
    warm: Path, tmp_path: Path, ray_directory: str, npus: int, actor: dict[str, Any], rl: dict[str, Any], **home: str
) -> None:
    directory = _copy(warm, tmp_path)
    config = tiny.configuration(
        directory,
        megatron_training={"train_iters": 3},
        actor_config=actor,
        rl_config={"actor_resource": {"num_npus": npus}, **rl},
        coca={"samples_interval": 2, "eval_interval": 2, "eval_data": str(directory / "eval.jsonl")},
    )
    log = _finish(_start(directory, config, ray_directory, **home), directory)
    rows = _metrics(directory)
    assert [row["iteration"] for row in rows] == [1, 2, 3]
    for row in rows:
        assert 0 < row["actor/grad_norm"] < float("inf")
        assert row["actor/rollout_log_prob_gap"] < 1e-4
        assert -1 <= row["coca/confidence_reward"] <= 0
        assert row["coca/grading_seconds"] > 0
    assert [row["iteration"] for row in _metrics(directory, "validation.jsonl")] == [0, 2, 3]
    samples = (directory / "output" / "samples" / "iteration_000002.jsonl").read_text().splitlines()
    assert len(samples) == 2 * 8
    assert {"prompt", "response", "confidence", "success_rate", "answer_advantage"} <= set(json.loads(samples[0]))
    assert "coca/confidence_reward" in log  # MindSpeed-RL's own logger shows it
    assert "reference" not in "".join(key for row in rows for key in row)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_it_learns_to_say_how_sure_it_is(seed: int, tmp_path: Path, ray_directory: str) -> None:
    """Confidence reward up and batch ECE down, first against last ten iterations of a run on arithmetic."""
    (tmp_path / "model").mkdir()
    tiny.write_model(tmp_path / "model", seed=seed, warm_up_steps=700)
    tiny.write_questions(tmp_path, seed=seed)
    config = tiny.configuration(
        tmp_path,
        megatron_training={"train_iters": LEARNING_ITERATIONS, "global_batch_size": 32, "seed": seed + 1},
        rl_config={"mini_batch_size": 32},
        actor_config={"lr": 1.0e-3, "micro_batch_size": 256},
    )
    _finish(_start(tmp_path, config, ray_directory), tmp_path, timeout=1500)
    rows = _metrics(tmp_path)
    assert len(rows) == LEARNING_ITERATIONS

    def mean(name: str, part: list[dict[str, float]]) -> float:
        return sum(row[name] for row in part) / len(part)

    before, after = rows[:10], rows[-10:]
    for name in ("coca/confidence_reward", "coca/batch_ece", "coca/answer_reward", "coca/confidence"):
        print(f"seed {seed}: {name} {mean(name, before):.3f} -> {mean(name, after):.3f}")
    assert mean("coca/confidence_reward", after) > 0.6 * mean("coca/confidence_reward", before)  # both are negative
    assert mean("coca/batch_ece", after) < 0.6 * mean("coca/batch_ece", before)
    assert mean("coca/answer_reward", after) > mean("coca/answer_reward", before) - 0.05


@pytest.mark.skipif(MASTER not in os.environ, reason=f"needs a checkout of MindSpeed-RL's master: {MASTER} not set")
def test_the_loop_runs_on_master(warm: Path, tmp_path: Path, ray_directory: str) -> None:
    _run_and_check(warm, tmp_path, ray_directory, 1, {}, {}, MINDSPEED_RL_HOME=os.environ[MASTER])


def test_an_edited_mindspeed_rl_is_refused_before_anything_starts(warm: Path, tmp_path: Path) -> None:
    directory = _copy(warm, tmp_path / "run")
    edited = tmp_path / "edited"
    original = Path(os.environ["MINDSPEED_RL_HOME"])
    for part in ("cli", "configs", "mindspeed_rl"):
        shutil.copytree(original / part, edited / part, ignore=shutil.ignore_patterns("__pycache__"))
    loss = edited / "mindspeed_rl" / "models" / "loss" / "base_loss_func.py"
    loss.write_text(loss.read_text().replace("skip_entropy=True", "skip_entropy=False"))
    started = time.monotonic()
    process = _start(directory, tiny.configuration(directory), "/nonexistent", MINDSPEED_RL_HOME=str(edited))
    assert process.wait(timeout=120) == 1
    log = (directory / "log").read_text()
    assert "mindspeed_rl.models.loss.base_loss_func:BaseLossFunc (expected" in log
    assert "Ray" not in log, f"something started within {time.monotonic() - started:.0f} s"


def test_a_killed_worker_ends_the_run_and_a_resume_goes_on(warm: Path, tmp_path: Path, ray_directory: str) -> None:
    directory = _copy(warm, tmp_path)
    config = tiny.configuration(directory, megatron_training={"train_iters": 20, "save_interval": 2})
    process = _start(directory, config, ray_directory)
    marker = directory / "checkpoints" / "latest_checkpointed_iteration.txt"
    deadline = time.monotonic() + 600
    while not marker.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.2)
    log = (directory / "log").read_text(errors="replace")
    (pid,) = set(re.findall(r"\(ActorWithoutReference pid=(\d+)\)", log))
    os.kill(int(pid), signal.SIGKILL)
    assert process.wait(timeout=120) == 1
    log = (directory / "log").read_text(errors="replace")
    assert re.search(r"coca-mindspeed: training ended: .*ActorDiedError.*ActorWithoutReference", log)
    assert f"resume from the last checkpoint in {directory / 'checkpoints'}" in log
    saved = int(marker.read_text())
    done = len(_metrics(directory))

    config["actor_config"] |= {
        "load": str(directory / "checkpoints"),
        "finetune": False,
        "no_load_optim": False,
        "no_load_rng": True,
    }
    _finish(_start(directory, config, ray_directory), directory)
    assert [row["iteration"] for row in _metrics(directory)[done:]] == list(range(saved + 1, 21))
