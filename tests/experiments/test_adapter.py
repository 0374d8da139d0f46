"""The adapter that keeps the change of a training."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from coca_mindspeed.algorithm.methods import method_settings
from coca_mindspeed.config.prompt_form import PromptForm, TrainedPrompt
from coca_mindspeed.data.records import Record
from coca_mindspeed.errors import DataError
from experiments.smollm2 import add_adapter
from experiments.smollm2.adapter import input_moments, low_rank, write_adapter
from tests.local.models_for_tests import write_random_model


def test_the_nearest_change_of_a_lower_rank_by_hand():
    """Inputs of the second moment diag(1, 100, 1): the change diag(4, 2, 0) has the sizes 4 and 20, not 4 and 2."""
    difference, moment = torch.diag(torch.tensor([4.0, 2.0, 0.0])), torch.diag(torch.tensor([1.0, 100.0, 1.0])).double()
    first, second, share = low_rank(difference, moment, 1)
    assert (first.shape, second.shape) == ((1, 3), (3, 1))
    assert torch.allclose(second @ first, torch.diag(torch.tensor([0.0, 2.0, 0.0])).double(), atol=1e-9)
    assert share == pytest.approx(400 / 416, abs=0.002)
    first, second, share = low_rank(difference, moment, 2)
    assert torch.allclose(second @ first, difference.double(), atol=1e-9)
    assert share == pytest.approx(1.0)


def test_moments_are_those_of_the_inputs_and_a_shared_prefix_counts_once():
    config = LlamaConfig(
        num_attention_heads=2, hidden_size=16, intermediate_size=32, num_hidden_layers=1, vocab_size=50
    )
    torch.manual_seed(0)
    prefix = list(range(20))
    model, texts = LlamaForCausalLM(config).eval(), [[*prefix, 23, 24], [*prefix, 25], [*prefix, 26, 27, 28]]
    name, expected = "model.layers.0.self_attn.q_proj", torch.zeros(16, 16, dtype=torch.float64)
    found = input_moments(model, texts)
    layer = model.model.layers[0]
    for number, text in enumerate(texts):
        with torch.no_grad():
            inputs = layer.input_layernorm(model.model.embed_tokens(torch.tensor(text))).double()
        for row in inputs[20 if number else 0 :]:
            expected += torch.outer(row, row)
    assert torch.allclose(found[name], expected)
    assert set(found) == {n for n, _ in model.named_modules() if n.endswith("_proj")}


def test_a_model_and_its_adapter_are_the_trained_model(tmp_path):
    """A change of rank 2 is kept whole by an adapter of rank 2."""
    base, export, adapter = tmp_path / "base", tmp_path / "export", tmp_path / "adapter"
    write_random_model(base, "llama")
    write_random_model(export, "llama")
    model = LlamaForCausalLM.from_pretrained(base)
    torch.manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("_proj.weight"):
                weight += torch.randn(weight.shape[0], 2) @ torch.randn(2, weight.shape[1])
    model.save_pretrained(export)
    method = method_settings("coca")
    form = PromptForm(system_prompt=method.system_prompt, instructions={"factual": ""}, decimals=2)
    TrainedPrompt.of_training(form, method, 20).write(export)
    records = [
        Record(id=str(i), dataset="x", category="factual", question=f"What is {i}?", answer=str(i)) for i in range(9)
    ]
    assert write_adapter(export, base, records, adapter, 2) > 0.999
    assert (adapter / "coca_prompt.json").read_bytes() == (export / "coca_prompt.json").read_bytes()
    merged = add_adapter(LlamaForCausalLM.from_pretrained(base), adapter).state_dict()
    assert merged.keys() == model.state_dict().keys()
    for name, weight in model.state_dict().items():
        assert torch.allclose(merged[name], weight, atol=0.05), name
    with pytest.raises(DataError, match=r"nowhere: has no adapter_config\.json"):
        add_adapter(model, tmp_path / "nowhere")
