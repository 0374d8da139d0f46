"""The self-test at load: which attention and how much sharing it chooses, and that the choice is right."""

import json

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, __version__

from coca_mindspeed.config.schema import LoraConfig, ModelConfig
from coca_mindspeed.errors import ConfigError
from coca_mindspeed.local import self_test
from coca_mindspeed.local.activation_checkpointing import checkpoint_activations
from coca_mindspeed.local.attention import use_fast_attention
from coca_mindspeed.local.load import load_policy
from coca_mindspeed.local.lora import add_adapters
from coca_mindspeed.local.policy import Policy
from coca_mindspeed.local.sampler import sample_responses
from coca_mindspeed.local.self_test import SelfTestError, choose_computation
from tests import tokenizers_for_tests as kinds
from tests.local.models_for_tests import response_log_probs, write_random_model

CPU = torch.device("cpu")
_COMMON = {
    "vocab_size": 70,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 2,
    "eos_token_id": 1,
}
_TRANSFORMERS_4 = __version__.startswith("4.")
_GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 512}
_EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_GPT_NEO = {"num_hidden_layers": ..., "num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]}
_GEMMA3N = {
    "num_kv_shared_layers": 2,
    "vocab_size_per_layer_input": 70,
    "hidden_size_per_layer_input": 8,
    "laurel_rank": 4,
    "activation_sparsity_pattern": None,
}
_DEEPSEEK = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 4,
}
WINDOW = {"sliding_window": 8}
#: name: architecture, settings of its own, attention asked for, attention and sharing chosen (None: refused).
ARCHITECTURES = {
    "llama": ("llama", {}, "sdpa", ("sdpa", "prefix")),
    "llama, eager": ("llama", {}, "eager", ("eager", "prefix")),
    "nearly uniform": ("llama", {"initializer_range": 0.02}, "sdpa", ("sdpa", "prefix")),
    "few positions": ("llama", {"max_position_embeddings": 12}, "sdpa", ("sdpa", "prefix")),
    "qwen2": ("qwen2", {}, "sdpa", ("sdpa", "prefix")),
    "qwen3": ("qwen3", {}, "sdpa", ("sdpa", "prefix")),
    "qwen3_moe": ("qwen3_moe", _EXPERTS, "sdpa", ("sdpa", "prefix")),
    "deepseek_v3": ("deepseek_v3", _DEEPSEEK, "sdpa", ("sdpa", "prefix")),
    "mistral": ("mistral", WINDOW, "sdpa", ("sdpa", "prompts")),
    "mistral, long window": ("mistral", {"sliding_window": 300}, "sdpa", ("sdpa", "prompts")),
    "mistral, no window": ("mistral", {"sliding_window": None}, "sdpa", ("sdpa", "prefix")),
    "phi3": ("phi3", WINDOW, "sdpa", ("sdpa", "prompts")),
    "gemma": ("gemma", {}, "sdpa", ("sdpa", "prefix")),
    "gemma2": ("gemma2", {"query_pre_attn_scalar": 8, **WINDOW}, "sdpa", ("eager", "prompts")),
    "gemma2, long window": (
        "gemma2",
        {"query_pre_attn_scalar": 8, "sliding_window": 300},
        "sdpa",
        ("eager", "prompts"),
    ),
    "gemma2, eager": ("gemma2", {"query_pre_attn_scalar": 8, **WINDOW}, "eager", ("eager", "prompts")),
    "gemma3_text": ("gemma3_text", WINDOW, "sdpa", ("sdpa", "prompts")),
    "gemma3n_text": ("gemma3n_text", {**_GEMMA3N, **WINDOW}, "sdpa", None),
    "llama4_text": (
        "llama4_text",
        {"attention_chunk_size": 8, "intermediate_size_mlp": 48, "num_local_experts": 2},
        "sdpa",
        ("sdpa", "prompts"),
    ),
    "cohere2": ("cohere2", WINDOW, "sdpa", ("sdpa", "prompts")),
    "gpt_oss": ("gpt_oss", {**_EXPERTS, **WINDOW}, "eager", ("eager", "prompts")),
    "gpt2": ("gpt2", _GPT2, "sdpa", ("sdpa", "prefix")),
    "gptj": ("gptj", {**_GPT2, "rotary_dim": 8}, "eager", ("eager", "prefix")),
    "codegen": ("codegen", {**_GPT2, "rotary_dim": 8}, "eager", ("eager", "prefix")),
    "gpt_neo": ("gpt_neo", {**_GPT_NEO, "window_size": 8}, "eager", ("eager", "prompts")),
    "gpt_neo, long window": ("gpt_neo", {**_GPT_NEO, "window_size": 256}, "eager", ("eager", "prompts")),
    "gpt_neox": ("gpt_neox", {}, "sdpa", ("sdpa", "prefix")),
    "opt": ("opt", {"word_embed_proj_dim": 32, "ffn_dim": 48}, "sdpa", ("sdpa", "prefix")),
    "falcon": ("falcon", {"head_dim": ..., "alibi": False}, "sdpa", ("sdpa", "prefix")),
    "stablelm": ("stablelm", {}, "sdpa", ("sdpa", "prefix")),
    "bloom": ("bloom", {"n_layer": 2, "n_head": 4}, "eager", ("eager", "prefix")),
    "mpt": ("mpt", {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 512}, "eager", ("eager", "prompts")),
}


def config_of(architecture, own):
    return AutoConfig.for_model(architecture, **{k: v for k, v in {**_COMMON, **own}.items() if v is not ...})


def model_of(name, attention=None):
    if not _TRANSFORMERS_4 and attention is None and name in ("gemma2", "gemma2, long window"):
        pytest.skip("transformers 5 has no sdpa for Gemma 2")
    architecture, own, asked, _ = ARCHITECTURES[name]
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config_of(architecture, own), attn_implementation=attention or asked).eval()


def policy_of(name):
    model = model_of(name)
    use_fast_attention(model, CPU)
    return Policy(model, None, None, (1,), 0)


def chosen(policy):
    attention = policy.model.config._attn_implementation
    return ("eager" if attention == "eager" else "sdpa"), policy.sharing


def alone(model, prompt, response):
    """Log-probs of a response without padding, cache or PAD."""
    logits = model(torch.tensor([[*prompt, *response]]), use_cache=False).logits[0, len(prompt) - 1 : -1].float()
    logits = logits.index_fill(1, torch.tensor([0]), -torch.inf)
    return logits.log_softmax(-1).gather(1, torch.tensor(response)[:, None])[:, 0]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_choice_computes_what_plain_eager_passes_compute(name):
    """On other and longer texts: what is sampled, its log-probs, and their gradient by every weight."""
    policy, expected = policy_of(name), ARCHITECTURES[name][3]
    if expected is None:
        with pytest.raises(SelfTestError):
            choose_computation(policy)
        return
    problem = choose_computation(policy)
    assert chosen(policy) == expected
    assert bool(problem) == (expected != (ARCHITECTURES[name][2], "prefix"))
    model, start = policy.model, {"few positions": 2, "mistral, long window": 330}.get(name, 40)
    start = start if "long" not in name else 330
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(3, 70, (start + 9,), generator=generator).tolist()
    prompts = [tokens[: start + 1], [*tokens[:start], 5, 9, 7], [*tokens[:start], *tokens[-7:]][: start + 5]]
    new = 4 if name == "few positions" else 10
    samples = sample_responses(policy, prompts, group_size=3, max_new_tokens=new, temperature=1.0, generator=generator)
    found = response_log_probs(policy, prompts, samples.token_ids, temperature=1.0)
    found[samples.inside].sum().backward()
    gradient = {key: p.grad for key, p in model.named_parameters() if p.grad is not None}
    plain = model_of(name, "eager")
    plain.load_state_dict(model.state_dict())
    total = 0.0
    for row, (ids, length) in enumerate(zip(samples.token_ids.tolist(), samples.lengths.tolist(), strict=True)):
        log_probs = alone(plain, prompts[row // 3], ids[:length])
        torch.testing.assert_close(samples.log_probs[row, :length], log_probs.detach(), atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(found.detach()[row, :length], log_probs.detach(), atol=1e-4, rtol=1e-4)
        total = total + log_probs.sum()
    total.backward()
    expected_gradient = {key: p.grad for key, p in plain.named_parameters() if p.grad is not None}
    assert gradient.keys() == expected_gradient.keys()
    difference = sum(float((gradient[key] - g).square().sum()) for key, g in expected_gradient.items())
    assert difference**0.5 <= 1e-4 * sum(float(g.square().sum()) for g in expected_gradient.values()) ** 0.5


@pytest.mark.parametrize("name", ["llama", "gemma2", "mistral, long window"])
def test_it_leaves_everything_as_it_was(name):
    policy = policy_of(name)
    model, state = policy.model, torch.random.get_rng_state()
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    window = model.config.to_dict()
    choose_computation(policy)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert model.config.to_dict() == window
    assert all(torch.equal(tensor, before[key]) for key, tensor in model.state_dict().items())
    assert all(p.requires_grad and p.grad is None for p in model.parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


@pytest.mark.parametrize("name", ["llama", "gemma2", "mistral"])
def test_layers_that_run_again_and_adapters_change_no_choice(name):
    policy = policy_of(name)
    checkpoint_activations(policy.model)
    choose_computation(policy)
    assert chosen(policy) == ARCHITECTURES[name][3]
    pytest.importorskip("peft")
    add_adapters(policy, LoraConfig(rank=2, targets="all-linear"), seed=0)
    choose_computation(policy)
    assert chosen(policy) == ARCHITECTURES[name][3]
    assert {p.requires_grad for p in policy.model.parameters()} == {True, False}


@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "gemma2", "mistral", "gpt_neo"])
def test_weights_in_bfloat16_are_compared_in_float32(name):
    """Rounding of 0.05 nats would hide an attention that is off by as much; and no weight is replaced for good."""
    policy = policy_of(name)
    policy.model.to(torch.bfloat16)
    weights = {key: parameter.data_ptr() for key, parameter in policy.model.named_parameters()}
    choose_computation(policy)
    assert chosen(policy) == ARCHITECTURES[name][3]
    assert {key: p.data_ptr() for key, p in policy.model.named_parameters()} == weights
    assert {p.dtype for p in policy.model.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("broken", ["by_sampler", "by_update"])
def test_a_mistake_of_the_sampler_or_of_the_update_is_seen(broken, monkeypatch):
    right = getattr(self_test._Case, broken)

    def off(case, policy):
        found = right(case, policy)
        return found if policy.sharing == "none" else self_test._Found(found.log_probs + 0.01, found.gradient)

    monkeypatch.setattr(self_test._Case, broken, off)
    policy = policy_of("llama")
    assert "0.01 nats" in choose_computation(policy)
    assert policy.sharing == "none"
    samples = sample_responses(
        policy, [[*range(5, 30)], [*range(5, 28)]], group_size=2, max_new_tokens=4, temperature=1.0, generator=None
    )
    found, plain = (
        response_log_probs(policy, samples.prompts, samples.token_ids, temperature=1.0, share_prompts=share)
        for share in (True, False)
    )
    assert torch.equal(found, plain)


def test_a_gradient_that_is_cut_is_seen(monkeypatch):
    """Keys and values that are detached change no log-prob."""
    from transformers.cache_utils import DynamicLayer

    update = DynamicLayer.update
    monkeypatch.setattr(
        DynamicLayer, "update", lambda self, k, v, *a, **b: update(self, k.detach(), v.detach(), *a, **b)
    )
    policy = policy_of("llama")
    assert "gradient" in choose_computation(policy)
    assert policy.sharing == "none"


# ---- through load_policy


def written(directory, model, tokenizer=None):
    tokenizer = tokenizer or kinds.qwen_like()
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


@pytest.mark.parametrize("name", ["gpt_oss", "gptj", "bloom"])
def test_an_attention_that_transformers_does_not_have_names_the_one_that_it_has(name, tmp_path):
    path = written(tmp_path / "model", model_of(name))
    with pytest.raises(ConfigError, match=r"model\.attention=sdpa.*model\.path=.*model\.attention=eager"):
        load_policy(path, ModelConfig(), CPU)


@pytest.mark.skipif(not _TRANSFORMERS_4, reason="transformers 5 has no sdpa for Gemma 2")
def test_a_choice_other_than_the_one_asked_for_is_printed(tmp_path, capsys):
    architecture, own, *_ = ARCHITECTURES["gemma2"]
    tokenizer = kinds.qwen_like()
    model = AutoModelForCausalLM.from_config(config_of(architecture, {**own, "vocab_size": len(tokenizer)}))
    path = written(tmp_path / "model", model, tokenizer)
    policy = load_policy(path, ModelConfig(), CPU)
    assert chosen(policy) == ("eager", "prompts")
    assert "model.attention=eager" in capsys.readouterr().err
    load_policy(write_random_model(tmp_path / "llama", "llama"), ModelConfig(), CPU)
    assert capsys.readouterr().err == ""


def test_the_text_part_of_a_model_that_also_sees_is_trained(tmp_path):
    tokenizer = kinds.qwen_like()
    text = config_of("gemma3_text", {**WINDOW, "vocab_size": len(tokenizer)}).to_dict()
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"image_size": 28, "patch_size": 14}
    config = AutoConfig.for_model("gemma3", text_config=text, vision_config=vision, mm_tokens_per_image=1)
    torch.manual_seed(0)
    path = written(tmp_path / "model", AutoModelForImageTextToText.from_config(config), tokenizer)
    assert json.loads((path / "config.json").read_text())["model_type"] == "gemma3"
    assert chosen(load_policy(path, ModelConfig(), CPU)) == ("sdpa", "prompts")


@pytest.mark.skipif(not _TRANSFORMERS_4, reason="transformers 5 computes Gemma 3n correctly without sharing")
def test_a_model_that_no_choice_computes_is_refused_by_its_key(tmp_path):
    architecture, own, *_ = ARCHITECTURES["gemma3n_text"]
    tokenizer = kinds.qwen_like()
    own = {**own, "vocab_size": len(tokenizer), "vocab_size_per_layer_input": len(tokenizer)}
    path = written(tmp_path / "model", AutoModelForCausalLM.from_config(config_of(architecture, own)), tokenizer)
    with pytest.raises(ConfigError, match=r"model\.path=.*Gemma3n.*log-probs differ"):
        load_policy(path, ModelConfig(), CPU)
