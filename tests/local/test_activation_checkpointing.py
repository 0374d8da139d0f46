"""Gradient checkpointing: fewer activations are kept, and the gradient is the same, with and without shared prompts."""

import pytest
import torch

from coca_mindspeed.config.schema import ModelConfig
from coca_mindspeed.errors import ConfigError
from coca_mindspeed.local.load import load_policy
from coca_mindspeed.local.sampler import sample_responses
from coca_mindspeed.local.update import ResponseBatch
from tests.local.models_for_tests import random_policy, write_random_model
from tests.local.runs_for_tests import result, train


def kept_and_gradient(policy, prompts, share_prompts):
    """Numbers that the forward pass keeps besides the parameters, and the gradient."""
    generator = torch.Generator().manual_seed(1)
    token_ids = torch.randint(2, 61, (6, 10), generator=generator)
    weights = torch.randn(6, 10, generator=generator)
    own = {p.untyped_storage().data_ptr() for p in policy.model.parameters()}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        scores = ResponseBatch(policy, prompts, token_ids, 0.9, share_prompts).scores()
    (scores.log_probs * weights).sum().backward()
    gradient = torch.cat([p.grad.flatten() for p in policy.model.parameters()])
    return sum(kept.values()), scores.log_probs.detach(), gradient


@pytest.mark.parametrize("prompts", [[[7, 8, 9, 12], [10, 11]], [[5, 6, 7], [8, 9, 10]]], ids=["mixed", "equal"])
@pytest.mark.parametrize("share_prompts", [True, False])
@pytest.mark.parametrize("architecture", ["llama", "gemma2", "gpt2", "gpt_neox"])
def test_less_is_kept_for_the_same_gradient(architecture, share_prompts, prompts):
    kept, log_probs, gradient = kept_and_gradient(random_policy(architecture, recompute=False), prompts, share_prompts)
    less, again, same = kept_and_gradient(random_policy(architecture, recompute=True), prompts, share_prompts)
    assert torch.equal(again, log_probs)
    assert float(gradient.norm()) > 0
    assert float((same - gradient).norm() / gradient.norm()) < 1e-6
    assert less < 0.5 * kept


def test_under_autocast_as_well():
    prompts, dtype = [[7, 8, 9, 12], [10, 11]], torch.bfloat16
    _, log_probs, gradient = kept_and_gradient(random_policy("llama", recompute=False, dtype=dtype), prompts, True)
    _, again, same = kept_and_gradient(random_policy("llama", recompute=True, dtype=dtype), prompts, True)
    assert torch.equal(again, log_probs)
    assert float((same - gradient).norm() / gradient.norm()) < 1e-3


def test_sampling_is_left_alone(tmp_path):
    path = write_random_model(tmp_path / "model", "qwen2")
    sampled = []
    for recompute in (False, True):
        policy = load_policy(path, ModelConfig(gradient_checkpointing=recompute), torch.device("cpu"))
        generator = torch.Generator().manual_seed(0)
        arguments = {"group_size": 3, "max_new_tokens": 12, "temperature": 1.0, "generator": generator}
        sampled.append(sample_responses(policy, [[5, 6, 7], [8, 9]], **arguments))
    assert torch.equal(sampled[0].token_ids, sampled[1].token_ids)
    assert torch.equal(sampled[0].log_probs, sampled[1].log_probs)


def test_a_run_with_it_ends_with_the_same_bytes(tmp_path):
    for value in ("false", "true"):
        train(tmp_path / value, f"model.gradient_checkpointing={value}", "trainer.steps=2", "evaluation.interval=0")
    assert result(tmp_path / "true") == result(tmp_path / "false")


def test_a_model_without_such_layers_is_refused(tmp_path, monkeypatch):
    path = write_random_model(tmp_path / "model", "llama")
    monkeypatch.setattr("coca_mindspeed.local.load.GradientCheckpointingLayer", torch.nn.Conv3d)
    with pytest.raises(ConfigError, match=r"model\.path=.*: a LlamaForCausalLM has no layers that can be recomputed"):
        load_policy(path, ModelConfig(gradient_checkpointing=True), torch.device("cpu"))
