"""Heads that share keys and values read them in place: the same numbers as by transformers' own way, and no copies."""

import json

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM
from transformers.integrations import sdpa_attention

from coca_mindspeed.config.schema import ModelConfig
from coca_mindspeed.local import grouped_attention
from coca_mindspeed.local.checkpoint import export_model
from coca_mindspeed.local.grouped_attention import group_heads
from coca_mindspeed.local.log_probs import response_log_probs
from coca_mindspeed.local.policy import load_policy
from coca_mindspeed.local.sampler import sample_responses
from tests.local.models_for_tests import write_random_model

PROMPTS = [[5, 6, 7], [8, 9, 10, 11, 12, 13], [14]]
OF_ONE_LENGTH = [[5, 6, 7], [8, 9, 10]]
CPU = torch.device("cpu")


@pytest.fixture(params=["qwen2", "llama"])
def policies(request, tmp_path):
    """The same model twice: as it is loaded, and with transformers' own attention."""
    path = write_random_model(tmp_path / "model", request.param)
    ours, theirs = (load_policy(path, ModelConfig(), CPU) for _ in range(2))
    theirs.model.set_attn_implementation("sdpa")
    return ours, theirs


def sampled(policy, prompts=PROMPTS):
    draw = torch.Generator().manual_seed(0)
    return sample_responses(policy, prompts, group_size=6, max_new_tokens=25, temperature=0.9, generator=draw)


@pytest.mark.parametrize("prompts", [PROMPTS, OF_ONE_LENGTH], ids=["of several lengths", "of one length"])
def test_samples_are_the_same_but_for_rounding(policies, prompts):
    ours, theirs = (sampled(policy, prompts) for policy in policies)
    assert torch.equal(ours.token_ids, theirs.token_ids)
    torch.testing.assert_close(ours.log_probs, theirs.log_probs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("prompts", [PROMPTS, OF_ONE_LENGTH], ids=["of several lengths", "of one length"])
def test_a_group_of_heads_reads_its_keys_once(policies, prompts, monkeypatch):
    """A sampled token's heads are rows of one head, and a head reads its keys and values once."""
    seen = []
    attend = grouped_attention.scaled_dot_product_attention

    def watched(query, key, *arguments, **options):
        seen.append((query.shape[1], key.shape[1], query.shape[2]))
        return attend(query, key, *arguments, **options)

    monkeypatch.setattr(grouped_attention, "scaled_dot_product_attention", watched)
    tokens = sampled(policies[0], prompts).token_ids.shape[1]
    assert seen.count((2, 2, 2)) == 2 * (tokens - 1)  # of each layer; a prompt's pass drew the first token


def test_gradients_are_the_same_but_for_rounding(policies):
    token_ids = sampled(policies[0]).token_ids
    for share_prompts in (True, False):
        gradients = []
        for policy in policies:
            policy.model.zero_grad()
            arguments = {"temperature": 1.0, "share_prompts": share_prompts}
            response_log_probs(policy, PROMPTS, token_ids, **arguments).sum().backward()
            gradients.append([parameter.grad.clone() for parameter in policy.model.parameters()])
        for ours, theirs in zip(*gradients, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5 * float(theirs.abs().max()))


def test_nothing_is_copied(policies, monkeypatch):
    def copies(*_):
        raise AssertionError("keys or values are copied for every head")

    monkeypatch.setattr(sdpa_attention, "repeat_kv", copies)
    token_ids = sampled(policies[0]).token_ids
    response_log_probs(policies[0], PROMPTS, token_ids, temperature=1.0).sum().backward()
    with pytest.raises(AssertionError, match="for every head"):
        sampled(policies[1])


def test_what_is_saved_does_not_know_of_it(policies, tmp_path):
    for name, policy in zip(("ours", "theirs"), policies, strict=True):
        export_model(policy, tmp_path / name)
    ours, theirs = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("ours", "theirs"))
    assert ours == theirs


@pytest.mark.parametrize(("kv_heads", "attention"), [(4, "sdpa"), (2, "eager")])
def test_other_models_are_left_as_they_are(kv_heads, attention):
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "vocab_size": 50}
    heads = {"num_attention_heads": 4, "num_key_value_heads": kv_heads}
    model = Qwen2ForCausalLM._from_config(Qwen2Config(**shape, **heads), attn_implementation=attention)
    group_heads(model, torch.device("cpu"))
    assert model.config._attn_implementation == attention


def test_only_a_cpu_gains_by_it():
    """PyTorch's own kernels of a device repeat keys and values themselves, and estimates have to know that they do."""
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "vocab_size": 50}
    config = Qwen2Config(**shape, num_attention_heads=4, num_key_value_heads=2)
    for device, replaced in (("cpu", True), ("cuda", False)):
        model = Qwen2ForCausalLM._from_config(config, attn_implementation="sdpa")
        group_heads(model, torch.device(device))
        assert (model.config._attn_implementation != "sdpa") == replaced
