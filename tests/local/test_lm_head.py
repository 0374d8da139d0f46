"""The chunked LM head and the in-place embedding gradient equal PyTorch's."""

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from coca_mindspeed.local.lm_head import LMHead, add_embedding_gradients
from tests.local.models_for_tests import SHAPE, set_chunk_of

_SHAPE = {**SHAPE, "vocab_size": 61, "pad_token_id": 0}
_MODELS = {
    "tied": ("llama", {"tie_word_embeddings": True}),
    "untied": ("llama", {"tie_word_embeddings": False}),
    "bias": ("phi", {}),
    "soft cap": ("gemma2", {"head_dim": 8, "final_logit_softcapping": 2.0}),
    "logit_scale": ("cohere", {"logit_scale": 0.25}),
    "logits_scaling": ("granite", {"logits_scaling": 3.0}),
    "gpt2": ("gpt2", {"n_embd": 32, "n_head": 4, "n_positions": 64}),
}


def random_model(name):
    torch.manual_seed(0)
    architecture, own = _MODELS[name]
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(architecture, **_SHAPE, **own)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


@pytest.fixture
def chunks_of_7(monkeypatch):
    set_chunk_of(monkeypatch, 7, 61)


def sampling_logits(logits):
    banned = torch.zeros(logits.shape[-1], dtype=torch.bool)
    banned[0] = True
    return (logits.float() / 0.7).masked_fill(banned, -torch.inf)


def clipped(log_probs, old, advantages):
    """A loss as the objective is: a sum of terms of one token each, some without gradient."""
    ratio = (log_probs - old).exp()
    return -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).sum()


@pytest.mark.parametrize("name", _MODELS)
@pytest.mark.usefixtures("chunks_of_7")
def test_chunks_equal_all_logits_at_once(name):
    model, random = random_model(name), torch.Generator().manual_seed(1)
    ids = torch.randint(1, 61, (3, 12), generator=random)
    advantages = torch.randn(3, 11, generator=random)
    advantages[1] = 0  # a whole chunk, and parts of two others
    distribution = sampling_logits(model(ids, use_cache=False).logits[:, :-1]).log_softmax(-1)
    expected = distribution.gather(-1, ids[:, 1:, None])[..., 0]
    old = expected.detach() + 0.3 * torch.randn(3, 11, generator=random)
    clipped(expected, old, advantages).backward()
    gradients = {key: p.grad.clone() for key, p in model.named_parameters()}
    model.zero_grad()

    layer = LMHead.of(model)
    assert not layer.fits_one_chunk(33)
    states = layer.hidden_states(input_ids=ids, use_cache=False)[:, :-1]
    scores = layer.backward(states, ids[:, 1:], sampling_logits, lambda found: clipped(found, old, advantages))
    torch.testing.assert_close(scores.log_probs, expected.detach(), atol=1e-5, rtol=1e-5)
    entropy = torch.special.entr(distribution.detach().exp()).sum(-1)
    torch.testing.assert_close(scores.entropy, entropy, atol=1e-5, rtol=1e-5)
    again = layer.scores(states, ids[:, 1:], sampling_logits)
    assert torch.equal(scores.log_probs, again.log_probs.detach()), "what the policy is asked again is another number"
    assert torch.equal(scores.entropy, again.entropy)
    for key, parameter in model.named_parameters():
        difference = float((parameter.grad - gradients[key]).norm())
        assert difference <= 1e-5 * max(float(gradients[key].norm()), 1e-3), key

    once = {key: p.grad.clone() for key, p in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad *= 2  # of microbatches before this one
    states = layer.hidden_states(input_ids=ids, use_cache=False)[:, :-1]
    layer.backward(states, ids[:, 1:], sampling_logits, lambda found: clipped(found, old, advantages))
    for key, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, 3 * once[key], rtol=1e-4, atol=1e-6)


@pytest.mark.usefixtures("chunks_of_7")
def test_a_frozen_head_gets_no_gradient():
    layer = LMHead.of(random_model("untied"))
    layer.head.weight.requires_grad_(False)
    states = torch.randn(20, 32, requires_grad=True)
    layer.backward(states, torch.arange(20), sampling_logits, lambda log_probs: log_probs[1:].sum())
    assert layer.head.weight.grad is None
    assert float(states.grad[1:].norm()) > 0
    assert bool((states.grad[0] == 0).all())


@pytest.mark.usefixtures("chunks_of_7")
@pytest.mark.parametrize("known", [False, True])
def test_no_tensor_holds_the_logits_of_all_tokens_and_a_known_loss_makes_them_once(known):
    """Neither what the backward pass keeps, nor what either pass makes."""
    layer = LMHead.of(random_model("tied"))
    states, tokens = torch.randn(200, 32, requires_grad=True), torch.randint(1, 61, (200,))
    largest, products, weights = 0, 0, layer.head.weight.untyped_storage().data_ptr()

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal largest, products
            out = function(*args, **(kwargs or {}))
            products += function.overloadpacket.__name__ in ("mm", "addmm", "addmm_")
            own = isinstance(out, torch.Tensor) and out.untyped_storage().data_ptr() != weights
            if own and out.dim() == 2 and out.shape[1] == 61 and len(out) != 32:  # the weight's gradient, transposed
                largest = max(largest, len(out))
            return out

    kept = []
    with Watch(), torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
        if known:
            layer.backward(states, tokens, sampling_logits, torch.sum)
        else:
            layer.scores(states, tokens, sampling_logits).log_probs.sum().backward()
    assert largest == 7
    assert max(kept, default=0) <= 200 * 32
    # By chunk: logits (twice if they are recomputed), the gradient by the states and that by the weight.
    assert products == math.ceil(200 / 7) * (3 if known else 4)


def model(tied, padding=None):
    torch.manual_seed(0)
    config = LlamaConfig(**{**_SHAPE, "tie_word_embeddings": tied, "pad_token_id": padding})
    return LlamaForCausalLM(config).eval()


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
    add_embedding_gradients(ours, torch.device("cpu"))
    found = gradients(ours)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-5, atol=1e-7)
    looked_up = found["model.embed_tokens.weight"].abs().sum(dim=1)
    assert (looked_up[:9] > 0).sum() == (9 if padding is None or tied else 8)
