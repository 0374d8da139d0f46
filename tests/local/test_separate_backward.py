"""A pass that goes on from a cache: the same gradients, added up pass by pass."""

import gc
from collections import Counter

import pytest
import torch

from coca_mindspeed.local import log_probs
from coca_mindspeed.local.log_probs import ResponseBatch
from coca_mindspeed.local.prefix_sharing import go_on
from tests.local.models_for_tests import random_policy, set_chunk_of

START = list(range(20, 40))  # what both prompts begin with is a pass of its own
PROMPTS = {
    "one": [[7, 8, 9, 12]],
    "mixed": [[7, 8, 9, 12], [10, 11]],
    "a start in common": [[*START, 7, 8, 9], [*START, 10]],
    "a start in common, as long": [[*START, 7, 8], [*START, 10, 11]],
}


@pytest.fixture(autouse=True)
def _chunks(monkeypatch):
    set_chunk_of(monkeypatch, 7, 61)


def batch_of(policy, prompts, rows=6):
    token_ids = torch.randint(2, 61, (rows, 10), generator=torch.Generator().manual_seed(1))
    return ResponseBatch(policy, prompts, token_ids, temperature=0.9)


def gradient_of(policy, prompts):
    """The gradient, and how often each parameter had something added."""
    added = Counter()
    for name, parameter in policy.model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: added.update([name]))
    weights = torch.randn(6, 10, generator=torch.Generator().manual_seed(2))
    (batch_of(policy, prompts).scores().log_probs * weights).sum().backward()
    return torch.cat([p.grad.flatten() for p in policy.model.parameters()]), added


@pytest.mark.parametrize("prompts", PROMPTS.values(), ids=PROMPTS)
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("architecture", ["llama", "gemma2"])
def test_the_gradient_is_the_same_and_is_added_up_pass_by_pass(architecture, dtype, recompute, prompts, monkeypatch):
    found, added = gradient_of(random_policy(architecture, recompute=recompute, dtype=dtype), prompts)
    monkeypatch.setattr(log_probs, "go_on_separately", go_on)
    expected, at_once = gradient_of(random_policy(architecture, recompute=recompute, dtype=dtype), prompts)
    assert float(expected.norm()) > 0
    tolerance = 1e-6 if dtype == torch.float32 else 1e-2  # which sums are rounded to bfloat16 differs
    assert float((found - expected).norm() / expected.norm()) < tolerance
    weight = "model.layers.1.mlp.down_proj.weight"
    start = prompts[0][:2] == START[:2] and architecture == "llama"  # gemma2 has windows
    assert (added[weight], at_once[weight]) == (3 if start else 2, 1)


def test_what_needs_no_gradient_is_left_alone():
    policy = random_policy("llama", recompute=False)
    batch = batch_of(policy, PROMPTS["a start in common"])
    expected = batch.scores().log_probs.detach()
    with torch.no_grad():
        assert torch.equal(batch.scores().log_probs, expected)
    for name, parameter in policy.model.named_parameters():
        parameter.requires_grad_("layers.3.mlp" in name)  # behind all keys and values but the last layer's own
    batch.scores().log_probs.sum().backward()
    assert float(policy.model.model.layers[3].mlp.down_proj.weight.grad.norm()) > 0


@pytest.mark.parametrize("trained", ["layers.1.mlp", "layers.2.self_attn.q_proj", "layers.0.self_attn.k_proj"])
def test_a_model_that_is_frozen_in_part_has_the_same_gradient(trained, monkeypatch):
    """The first layers' keys and values need none, as beside adapters."""
    gradients = []
    for _ in range(2):
        policy = random_policy("llama", recompute=False)
        for name, parameter in policy.model.named_parameters():
            parameter.requires_grad_(trained in name)
        batch_of(policy, PROMPTS["a start in common"]).scores().log_probs.sum().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in policy.trained_parameters()]))
        monkeypatch.setattr(log_probs, "go_on_separately", go_on)
    found, expected = gradients
    assert float(expected.norm()) > 0
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("recompute", [False, True])
def test_keys_of_the_responses_are_held_by_none_but_the_backward_pass(recompute):
    """Where layers are recomputed, by nothing; nor does a layer's recomputation hold those of the layers before it."""
    batch = batch_of(random_policy("llama", recompute=recompute), PROMPTS["one"])
    states, _ = batch._joined_states()
    gc.collect()
    keys = [o for o in gc.get_objects() if type(o) is torch.Tensor and o.shape == (6, 2, 4 + 9, 8)]
    assert states.requires_grad
    assert not keys
