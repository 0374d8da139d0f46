"""AdamW with moments of eight bits: what it takes, what it refuses, and that a stopped run ends like a whole one."""

import importlib.util

import pytest
import torch

from coca_mindspeed.config.schema import ModelConfig, OptimizerConfig
from coca_mindspeed.errors import ConfigError
from coca_mindspeed.local.checkpoint import load_optimizer_state
from coca_mindspeed.local.load import load_policy
from coca_mindspeed.local.run_directory import list_checkpoints
from coca_mindspeed.local.schedule import learning_rate
from coca_mindspeed.local.update import build_optimizer, require_optimizer
from tests.local.models_for_tests import write_random_model
from tests.local.runs_for_tests import killed, result, train

EIGHT = "optimizer.name=adamw_8bit"
SHORT = ("trainer.steps=4", "evaluation.interval=0")
CPU = torch.device("cpu")
missing = importlib.util.find_spec("bitsandbytes") is None
needs_bitsandbytes = pytest.mark.skipif(missing, reason="bitsandbytes is not installed (make test-published)")


def test_other_devices_are_refused():
    with pytest.raises(ConfigError, match=r"optimizer\.name=adamw_8bit: .*meta"):
        require_optimizer(OptimizerConfig(name="adamw_8bit"), torch.device("meta"))
    require_optimizer(OptimizerConfig(), torch.device("meta"))


@needs_bitsandbytes
@pytest.mark.published
@pytest.mark.parametrize("architecture", ["qwen2", "llama"])
def test_large_weights_have_moments_of_a_byte_and_the_embedding_of_four(tmp_path, architecture):
    policy = load_policy(write_random_model(tmp_path, architecture), ModelConfig(), CPU)
    built = build_optimizer(policy, OptimizerConfig(name="adamw_8bit"))
    for parameter in policy.trained_parameters():
        parameter.grad = torch.full_like(parameter, 0.01)
    built.step()
    embedding = policy.model.get_input_embeddings().weight
    for parameter in policy.trained_parameters():
        large = parameter.numel() >= 4096 and parameter is not embedding
        assert built.state[parameter]["state1"].dtype == (torch.uint8 if large else torch.float32)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    output = tmp_path_factory.mktemp("finished")
    return output, train(output, EIGHT, *SHORT)


@needs_bitsandbytes
@pytest.mark.published
def test_a_resumed_run_ends_with_the_same_bytes(finished, tmp_path):
    newest = list_checkpoints(finished[0] / "checkpoints")[-1]
    saved = load_optimizer_state(newest, CPU)
    assert any(torch.uint8 in {value.dtype for value in _tensors(state)} for state in saved["state"].values())
    train(killed(finished[0], tmp_path / "run"), EIGHT, *SHORT, resume=True)
    assert result(tmp_path / "run") == result(finished[0])


def _tensors(value):
    if isinstance(value, dict):
        return [tensor for inner in value.values() for tensor in _tensors(inner)]
    return [value] if isinstance(value, torch.Tensor) else []


@pytest.mark.parametrize(
    ("schedule", "rates"),
    [
        ("constant", [0.5, 1, 1, 1, 1, 1]),
        ("linear", [0.5, 1, 0.9, 0.5, 0.2, 0.1]),
        ("cosine", [0.5, 1, 0.975528, 0.5, 0.095492, 0.024472]),
        ("wsd", [0.5, 1, 1, 1, 1, 0.5]),  # constant for 8 of 10 steps
    ],
)
def test_learning_rates_of_a_stage(schedule, rates):
    config = OptimizerConfig(lr=1.0, warmup_steps=2, schedule=schedule)
    assert [learning_rate(config, step, 12) for step in (0, 2, 3, 7, 10, 11)] == pytest.approx(rates, abs=1e-6)
