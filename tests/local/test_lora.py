"""LoRA: the base stays, checkpoints are small, the export is a plain model, and a stopped run ends like a whole one."""

import json
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM

from coca_mindspeed.config.schema import LoraConfig, ModelConfig
from coca_mindspeed.errors import TrainingError
from coca_mindspeed.local.checkpoint import export_model
from coca_mindspeed.local.load import load_policy
from coca_mindspeed.local.model_files import trained_bytes, weight_shapes
from coca_mindspeed.local.policy import add_adapters, dtype_of_weights, load_adapters, save_adapters
from coca_mindspeed.local.run_directory import list_checkpoints
from tests.local.models_for_tests import write_random_model
from tests.local.runs_for_tests import killed, result, small_session, train

pytest.importorskip("peft")

LORA = ("model.lora.rank=4", "optimizer.lr=0.01", "evaluation.interval=0", "trainer.steps=4")
IDS = torch.tensor([[3, 7, 11, 4, 9]])


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    output = tmp_path_factory.mktemp("finished")
    return output, train(output, *LORA)


def moved_policy(path, architecture="llama", **settings):
    """A random model with adapters that have learned something."""
    policy = load_policy(write_random_model(path, architecture), ModelConfig(), torch.device("cpu"))
    add_adapters(policy, LoraConfig(rank=2, **settings), seed=3)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in policy.trained_parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return policy


@torch.no_grad()
def logits(model):
    return model(input_ids=IDS).logits.float()


def test_checkpoints_hold_adapters_alone(finished):
    output, trainer = finished
    newest = list_checkpoints(output / "checkpoints")[-1]
    assert not newest.model.exists()
    assert (newest.adapters / "adapter_model.safetensors").exists()
    size = sum(file.stat().st_size for file in newest.path.rglob("*") if file.is_file())
    full = sum(12 * p.numel() for p in trainer.policy.model.parameters())
    assert size < 0.5 * full
    shapes = weight_shapes(output / "warm_start")
    trained = sum(12 * p.numel() for p in trainer.policy.trained_parameters())
    assert sum(trained_bytes(shapes, trainer.config.model.lora, "adamw")) == trained


def test_a_resumed_run_ends_with_the_same_bytes(finished, tmp_path):
    train(killed(finished[0], tmp_path / "run"), *LORA, resume=True)
    assert result(tmp_path / "run") == result(finished[0])


def test_another_base_is_not_resumed(finished, tmp_path):
    shutil.copytree(finished[0], tmp_path / "run")
    policy = load_policy(tmp_path / "run" / "warm_start", ModelConfig(), torch.device("cpu"))
    with torch.no_grad():
        policy.model.model.layers[0].mlp.up_proj.weight.mul_(1.01)
    export_model(policy, tmp_path / "run" / "warm_start")
    with pytest.raises(TrainingError, match="another base model"):
        small_session(tmp_path / "run", *LORA, resume=True)


@pytest.mark.parametrize(
    ("change", "rank", "message"),
    [
        (lambda path: (path / "adapter_model.safetensors").write_bytes(b"damaged"), 2, "holds no readable adapters"),
        (lambda path: (path / "base.sha256").unlink(), 2, "holds no readable adapters"),
        (lambda path: None, 3, r"does not hold the adapters that model\.lora describes"),
    ],
)
def test_adapters_that_cannot_be_loaded_are_named(tmp_path, change, rank, message):
    save_adapters(moved_policy(tmp_path / "model"), tmp_path / "adapters")
    change(tmp_path / "adapters")
    other = load_policy(tmp_path / "model", ModelConfig(), torch.device("cpu"))
    add_adapters(other, LoraConfig(rank=rank), seed=0)
    with pytest.raises(TrainingError, match=message):
        load_adapters(other, tmp_path / "adapters")


@pytest.mark.parametrize("architecture", ["qwen2", "llama"])
@pytest.mark.parametrize("base_dtype", ["float32", "bfloat16"])
def test_merged_is_what_both_compute(tmp_path, architecture, base_dtype):
    policy = moved_policy(tmp_path / "model", architecture, base_dtype=base_dtype)
    assert {p.dtype for p in policy.trained_parameters()} == {torch.float32}
    frozen = [p for p in policy.model.parameters() if not p.requires_grad]
    assert {p.dtype for p in frozen} == {getattr(torch, base_dtype)}
    expected = logits(policy.model)
    export_model(policy, tmp_path / "exported")
    torch.testing.assert_close(logits(policy.model), expected, atol=0, rtol=0)  # the policy is left as it was
    exported = load_policy(tmp_path / "exported", ModelConfig(), torch.device("cpu"))
    # In float32 both: bfloat16's rounding of activations is no matter of the weights.
    torch.testing.assert_close(logits(exported.model), logits(policy.model.float()), atol=1e-3, rtol=1e-4)
    # config.json names the dtype of the weights, so that transformers does not round the merged update.
    automatic = AutoModelForCausalLM.from_pretrained(tmp_path / "exported", dtype="auto")
    torch.testing.assert_close(logits(automatic), logits(exported.model), atol=0, rtol=0)
    written, base = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("exported", "model"))
    assert written == {**base, "dtype": "float32"}


def test_new_adapters_change_nothing_and_the_seed_draws_them(tmp_path):
    path = write_random_model(tmp_path / "model", "qwen2")
    drawn = []
    for seed in (1, 1, 2):
        policy = load_policy(path, ModelConfig(), torch.device("cpu"))
        before, state = logits(policy.model), torch.random.get_rng_state()
        add_adapters(policy, LoraConfig(rank=2), seed)
        assert torch.equal(torch.random.get_rng_state(), state)
        torch.testing.assert_close(logits(policy.model), before, atol=0, rtol=0)
        drawn.append(torch.cat([p.detach().flatten() for p in policy.trained_parameters()]))
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])


@pytest.mark.parametrize("loaded", ["float32", "bfloat16"])
def test_a_base_in_bfloat16_keeps_exact_positions(tmp_path, loaded):
    """Rounded frequencies would make another model of it than its export is, the more so the longer the text."""
    path, lora = write_random_model(tmp_path / "model", "qwen2"), LoraConfig(rank=2, base_dtype="bfloat16")
    exact = dict(load_policy(path, ModelConfig(), torch.device("cpu")).model.named_buffers())
    dtype = dtype_of_weights(lora) if loaded == "bfloat16" else torch.float32
    policy = load_policy(path, ModelConfig(), torch.device("cpu"), dtype=dtype)
    add_adapters(policy, lora, seed=3)
    assert {p.dtype for p in policy.model.parameters() if not p.requires_grad} == {torch.bfloat16}
    buffers = dict(policy.model.named_buffers())
    assert buffers.keys() == exact.keys()
    assert all(torch.equal(buffer, exact[name]) for name, buffer in buffers.items())
