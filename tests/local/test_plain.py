"""The plain path, for transformers before 4.57: what it samples and trains is what the full path does.

The second half runs on the packages that MindSpeed-RL 2.3.0 pins, in the interpreter that ``MINDSPEED_PINNED_PYTHON``
names (docs/port.md).
"""

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch

from coca_mindspeed.config.schema import ModelConfig
from coca_mindspeed.local import load, plain, prefill
from coca_mindspeed.local.load import load_policy
from coca_mindspeed.local.prefill import PreallocatedCache
from coca_mindspeed.local.sampler import Decoder, sample_responses
from coca_mindspeed.local.update import ResponseBatch
from tests.local.models_for_tests import write_random_model

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
PROMPTS = [[3, 4, 5, 6], [7, 8], [9, 10, 11]]


@pytest.fixture
def plainly(monkeypatch):
    """Chooses the plain path, whatever transformers is installed."""
    for module in (load, prefill):
        monkeypatch.setattr(module, "PLAIN", True)
    monkeypatch.setattr(load, "DTYPE", "torch_dtype")  # which newer releases take, too


def test_the_installed_release_chooses():
    assert (plain.PLAIN, plain.DTYPE) in ((True, "torch_dtype"), (False, "dtype"))
    assert (plain.DynamicLayer is object) == plain.PLAIN


@pytest.mark.parametrize("architecture", ["qwen2", "llama"])
def test_the_plain_path_samples_and_trains_alike(architecture, plainly, monkeypatch, tmp_path, capsys):
    path = write_random_model(tmp_path / "model", architecture)

    def policy():
        return load_policy(path, ModelConfig(gradient_checkpointing=True), CPU)

    def sampled(policy):
        generator = torch.Generator().manual_seed(0)
        options = {"group_size": 4, "max_new_tokens": 12, "temperature": 1.0, "generator": generator}
        return sample_responses(policy, PROMPTS, **options)

    def cache_of(policy):
        with torch.inference_mode():
            return Decoder(policy, PROMPTS).cache

    def gradient(policy, rollout):
        scores = ResponseBatch(policy, PROMPTS, rollout.token_ids, 1.0).backward(lambda log_probs: log_probs.sum())
        return scores.log_probs, {name: each.grad for name, each in policy.model.named_parameters()}

    plain_policy = policy()
    assert (plain_policy.sharing, plain_policy.model.config._attn_implementation) == ("none", "eager")  # noqa: SLF001
    assert plain_policy.model.dtype == torch.float32
    assert type(cache_of(plain_policy)) is plain.PlainCache
    assert plain.RELEASE in capsys.readouterr().err
    found = sampled(plain_policy)
    log_probs, gradients = gradient(plain_policy, found)
    monkeypatch.undo()
    full = policy()
    if plain.PLAIN:  # nothing to compare with
        return
    assert full.sharing == "prefix"
    assert type(cache_of(full)) is PreallocatedCache
    expected = sampled(full)
    assert torch.equal(found.token_ids, expected.token_ids)
    assert len(set(found.lengths.tolist())) > 1
    torch.testing.assert_close(found.log_probs, expected.log_probs, rtol=0, atol=1e-4)
    scores, by_name = gradient(full, expected)
    inside = torch.arange(scores.shape[1]) < expected.lengths[:, None]
    torch.testing.assert_close(log_probs[inside], scores[inside], rtol=0, atol=1e-4)
    for name, value in by_name.items():
        torch.testing.assert_close(gradients[name], value, rtol=1e-3, atol=1e-3, msg=name)


PINNED = "MINDSPEED_PINNED_PYTHON"
SMALL = "warm_up.steps=15 warm_up.batch=16 data.train_size=40 data.evaluate_size=16 rollout.prompts=4"
COMMANDS = {
    "demo": "{coca} demo {small} trainer.steps=2 --quiet --output {output}",
    "train local": "{coca} train local model.path={model} data.train={data} data.evaluate={data} rollout.prompts=2 "
    "rollout.group_size=2 rollout.max_new_tokens=12 trainer.steps=2 evaluation.preflight=0 --quiet --output {output}",
    "smoke": "bash launch/qwen25_7b_910b.sh --smoke --output {output}",
}


@pytest.mark.published
@pytest.mark.skipif(
    PINNED not in os.environ, reason=f"needs upstream's pinned packages (docs/port.md): {PINNED} not set"
)
@pytest.mark.parametrize("command", COMMANDS)
def test_the_local_engine_runs_on_the_packages_that_mindspeed_rl_pins(command, tmp_path):
    python, output, data = os.environ[PINNED], tmp_path / "run", tmp_path / "questions.jsonl"
    model = write_random_model(tmp_path / "model", "qwen2")
    rows = [{"id": str(i), "question": f"What is {i} + 1?", "answer": str(i + 1)} for i in range(8)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = COMMANDS[command].format(
        coca=f"{python} -m coca_mindspeed.cli", small=SMALL, output=output, model=model, data=data
    )
    environment = {**os.environ, "PYTHON": python, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(words.split(), cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert [json.loads(line)["step"] for line in (output / "metrics.jsonl").read_text().splitlines() if line][-1] == 2
    assert (output / "predictions_after.jsonl").exists()
    assert load_policy(output / "model", ModelConfig(), CPU).vocabulary > 0  # of one release, loaded by another
