"""Gradient checkpointing: fewer activations are kept, and the gradient is the same, with and without shared prompts."""

import pytest
import torch

from coca_mindspeed.config.schema import ModelConfig
from coca_mindspeed.errors import ConfigError
from coca_mindspeed.local.load import load_policy
from coca_mindspeed.local.update import ResponseBatch
from tests.local.models_for_tests import random_policy, write_random_model


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


@pytest.mark.parametrize("share_prompts", [True, False])
@pytest.mark.parametrize("architecture", ["llama", "gemma2", "gpt2", "gpt_neox"])
def test_less_is_kept_for_the_same_gradient(architecture, share_prompts):
    prompts = [[7, 8, 9, 12], [10, 11]]
    kept, log_probs, gradient = kept_and_gradient(random_policy(architecture, recompute=False), prompts, share_prompts)
    less, again, same = kept_and_gradient(random_policy(architecture, recompute=True), prompts, share_prompts)
    assert torch.equal(again, log_probs)
    assert float(gradient.norm()) > 0
    assert float((same - gradient).norm() / gradient.norm()) < 1e-6
    assert less < 0.5 * kept


def test_a_model_without_such_layers_is_refused(tmp_path, monkeypatch):
    path = write_random_model(tmp_path / "model", "llama")
    monkeypatch.setattr("coca_mindspeed.local.load.GradientCheckpointingLayer", torch.nn.Conv3d)
    with pytest.raises(ConfigError, match=r"model\.path=.*: a LlamaForCausalLM has no layers that can be recomputed"):
        load_policy(path, ModelConfig(gradient_checkpointing=True), torch.device("cpu"))
