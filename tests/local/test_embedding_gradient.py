"""The embedding's gradient, added up row by row: PyTorch's own numbers, and no tensor of the vocabulary a lookup."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

from coca_mindspeed.config.schema import ModelConfig
from coca_mindspeed.local.lm_head import add_embedding_gradients
from coca_mindspeed.local.log_probs import response_log_probs
from coca_mindspeed.local.policy import load_policy
from tests.local.models_for_tests import write_random_model

CPU = torch.device("cpu")
VOCABULARY = 61


def model(tied, padding=None):
    torch.manual_seed(0)
    shape = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=VOCABULARY, tie_word_embeddings=tied, pad_token_id=padding, **shape)
    ).eval()


def gradients(model, passes=3):
    """Of several passes with repeated tokens, each of which looks the embedding up twice."""
    draw = torch.Generator().manual_seed(1)
    for _ in range(passes):
        for ids in torch.randint(0, 9, (2, 4, 7), generator=draw):
            model(input_ids=ids, labels=ids).loss.backward(retain_graph=False)
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("padding", [None, 3])
def test_it_is_what_pytorch_makes(tied, padding):
    expected = gradients(model(tied, padding))
    ours = model(tied, padding)
    add_embedding_gradients(ours, CPU)
    found = gradients(ours)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-5, atol=1e-7)
    looked_up = found["model.embed_tokens.weight"].abs().sum(dim=1)
    assert (looked_up[:9] > 0).sum() == (9 if padding is None or tied else 8)


class _Ran(TorchDispatchMode):
    """The names of all operations that run."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_a_loaded_policy_has_it(tmp_path):
    policy = load_policy(write_random_model(tmp_path / "model", "llama"), ModelConfig(), CPU)
    ids = torch.randint(5, 40, (4, 6), generator=torch.Generator().manual_seed(0))
    with _Ran() as ran:
        response_log_probs(policy, [[5, 6, 7], [8, 9]], ids, temperature=1.0).sum().backward()
    assert "index_add_" in ran.names
    assert "embedding_dense_backward" not in ran.names


@pytest.mark.parametrize("how", ["another device", "another class", "sparse"])
def test_others_are_left_as_they_are(how):
    other = model(tied=False)
    if how == "another class":
        other.set_input_embeddings(type("Other", (torch.nn.Embedding,), {})(VOCABULARY, 8))
    elif how == "sparse":
        other.get_input_embeddings().sparse = True
    before = type(other.get_input_embeddings())
    add_embedding_gradients(other, torch.device("cuda" if how == "another device" else "cpu"))
    assert type(other.get_input_embeddings()) is before


def test_frozen_rows_are_looked_up_as_ever():
    frozen = model(tied=False)
    add_embedding_gradients(frozen, CPU)
    frozen.get_input_embeddings().weight.requires_grad_(False)
    assert gradients(frozen)["model.embed_tokens.weight"] is None
