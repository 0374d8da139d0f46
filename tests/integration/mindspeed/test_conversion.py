"""Weights to Megatron's form, trained, and back, by the scripts and MindSpeed-LLM's real converter, on a CPU."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.integration.mindspeed import tiny
from tests.integration.mindspeed.environment import REPOSITORY, environment, free_port, needs_mindspeed
from tests.integration.mindspeed.runs import json_lines

pytestmark = [*needs_mindspeed, pytest.mark.slow, pytest.mark.timeout(1800)]

# The converter imports packages that need an NPU: let it find the host platform's stand-ins for them.
PYTHON = """#!/usr/bin/env bash
if [[ $1 == convert_ckpt.py ]]; then
  exec {python} -c 'import runpy, sys
from coca_mindspeed.mindspeed.host_platform import install
install()
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")' "$@"
fi
exec {python} "$@"
"""
# The first step of Adam moves no weight by more than the learning rate, but for the rounding of float32.
_ADAM_STEP = 1e-3 * (1 + 1e-5)
CUT = {"qwen25_1p5b_910b": (2, 1), "llama3_8b_910b": (1, 2)}  # TP, PP


def _script(directory: Path, script: str, *arguments: str, ray_directory: str = "/nonexistent") -> None:
    python = directory / "python"
    python.write_text(PYTHON.format(python=sys.executable))
    python.chmod(0o755)
    log = directory / "log"
    with log.open("ab") as output:
        done = subprocess.run(
            ["bash", str(REPOSITORY / "launch" / script), *arguments],
            stdout=output,
            stderr=subprocess.STDOUT,
            timeout=900,
            check=False,
            env=environment(PYTHON=str(python), RAY_TMPDIR=ray_directory, RAY_PORT=str(free_port())),
        )
    assert done.returncode == 0, log.read_text(errors="replace")[-4000:]


def half_ulp_of_bfloat16(weights: torch.Tensor) -> torch.Tensor:
    """How far what was rounded to each of ``weights`` (bfloat16's eight bits of significand) can be from it."""
    ulps = torch.exp2(torch.frexp(weights.float()).exponent - 9.0)
    return torch.where(weights == 0, 0.0, ulps)


def _weights(directory: Path) -> dict[str, torch.Tensor]:
    return AutoModelForCausalLM.from_pretrained(directory).state_dict()


def test_the_bound_on_rounding_is_the_least_that_holds() -> None:
    weights = torch.logspace(-9, 1, 100_001, base=10.0)
    moved = (weights.bfloat16().float() - weights).abs() / half_ulp_of_bfloat16(weights.bfloat16())
    assert 0.999 < float(moved.max()) <= 1
    assert half_ulp_of_bfloat16(torch.zeros(1)) == 0


@pytest.mark.parametrize("run", CUT)
def test_there_trained_and_back(run: str, tmp_path: Path, ray_directory: str) -> None:
    (tmp_path / "model").mkdir()
    if run.startswith("llama"):
        tiny.write_model(tmp_path / "model", config=tiny.llama_config())
    else:
        tiny.write_model(tmp_path / "model", warm_up_steps=150)
    tiny.write_questions(tmp_path, train=64, evaluate=8)
    actor, (tp, pp) = "mindspeed_rl.actor_config", CUT[run]
    settings = [
        *tiny.run_overrides(tmp_path),
        *("hardware.npus_per_node=2", f"model.megatron_path={tmp_path / 'mcore'}"),
        *(f"{actor}.tensor_model_parallel_size={tp}", f"{actor}.pipeline_model_parallel_size={pp}"),
        *("optimizer.lr=1e-3", "evaluation.interval=0", "trainer.steps=1"),
        *("mindspeed_rl.coca.host.initial_weights=null", f"{actor}.load={tmp_path / 'mcore'}"),
    ]
    before = _weights(tmp_path / "model")

    _script(tmp_path, "convert_weights.sh", "hf2mcore", run, *settings)
    untouched = tmp_path / "untouched"
    (untouched / "stage0").mkdir(parents=True)
    (untouched / "stage0" / "checkpoints").symlink_to(tmp_path / "mcore")
    _script(tmp_path, "convert_weights.sh", "mcore2hf", run, "--output", str(untouched), *settings)
    returned = _weights(untouched / "hf")
    assert returned.keys() == before.keys()
    for name, weight in before.items():
        assert torch.equal(returned[name].bfloat16(), weight.bfloat16()), name

    trained = tmp_path / "trained"
    _script(tmp_path, f"{run}.sh", "--output", str(trained), *settings, ray_directory=ray_directory)
    (row,) = json_lines(trained / "stage0" / "metrics.jsonl")
    assert row["actor/rollout_log_prob_gap"] < 1e-4
    _script(tmp_path, "convert_weights.sh", "mcore2hf", run, "--output", str(trained), *settings)
    after = _weights(trained / "hf")
    assert after.keys() == before.keys()
    for name, weight in returned.items():  # from these, which bfloat16 holds exactly, training began
        assert ((after[name] - weight).abs() <= _ADAM_STEP + half_ulp_of_bfloat16(after[name])).all(), name
    if not run.startswith("llama"):  # which, untrained, states no confidence, so that there is nothing to prefer
        assert any(not torch.equal(after[name].bfloat16(), weight.bfloat16()) for name, weight in before.items())
