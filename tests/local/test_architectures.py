"""Prefix sharing and fast attention of each tested architecture against plain passes; others go without."""

import json

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, __version__

from coca_mindspeed.config.schema import ModelConfig
from coca_mindspeed.errors import ConfigError
from coca_mindspeed.local.attention import use_fast_attention
from coca_mindspeed.local.load import TESTED, check_sampler, load_policy, sharing_of
from coca_mindspeed.local.policy import Policy
from tests import tokenizers_for_tests as kinds
from tests.local.models_for_tests import SHAPE, response_log_probs

CPU = torch.device("cpu")
_TOKENS = {"vocab_size": 70, "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 1}
_COMMON = {**SHAPE, **_TOKENS, "head_dim": 8, "max_position_embeddings": 512, "initializer_range": 0.3}
_GPT2 = {"n_embd": 32, "n_head": 4, "n_positions": 512}
_EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_GEMMA3N = {"num_hidden_layers": 4, "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8, "laurel_rank": 4}
_RANKS = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
_GROUPS = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "num_key_value_heads": 4}
_DEEPSEEK = {**_RANKS, **_GROUPS, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
WINDOW = {"sliding_window": 8}
_CHUNKS = {"attention_chunk_size": 8, "intermediate_size_mlp": 48, "num_local_experts": 2}
#: name: architecture, settings of its own, and the expected sharing.
ARCHITECTURES = {
    **{name: (name, {}, "prefix") for name in ("cohere", "gemma", "gpt_neox", "granite", "llama", "mixtral", "olmo2")},
    **{name: (name, {}, "prefix") for name in ("qwen2", "qwen3", "smollm3", "stablelm")},
    **{name: (name, WINDOW, "prompts") for name in ("cohere2", "gemma3_text", "mistral", "phi3")},
    **{name: (name, _EXPERTS, "prefix") for name in ("qwen2_moe", "qwen3_moe")},
    "few positions": ("llama", {"max_position_embeddings": 12}, "prefix"),
    "long window": ("mistral", {"sliding_window": 300}, "prompts"),
    "no window": ("mistral", {"sliding_window": None}, "prefix"),
    "window of some layers": ("qwen2", {"use_sliding_window": True, "max_window_layers": 1, **WINDOW}, "prompts"),
    "deepseek_v3": ("deepseek_v3", _DEEPSEEK, "prefix"),
    "llama4_text": ("llama4_text", _CHUNKS, "prompts"),
    "gpt2": ("gpt2", _GPT2, "prefix"),
    "opt": ("opt", {"word_embed_proj_dim": 32, "ffn_dim": 48}, "prefix"),
    # not tested: eager attention, nothing shared
    "gemma2": ("gemma2", {"query_pre_attn_scalar": 8, **WINDOW}, "none"),
    "gpt_oss": ("gpt_oss", {**_EXPERTS, **WINDOW}, "none"),
    "gptj": ("gptj", {**_GPT2, "rotary_dim": 8}, "none"),
    "bloom": ("bloom", {"n_head": 4}, "none"),
    "mpt": ("mpt", {"d_model": 32, "n_heads": 4, "max_seq_len": 512}, "none"),
}


def config_of(architecture, own):
    return AutoConfig.for_model(architecture, **{k: v for k, v in {**_COMMON, **own}.items() if v is not ...})


def model_of(name, attention):
    architecture, own, _ = ARCHITECTURES[name]
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config_of(architecture, own), attn_implementation=attention).eval()


def alone(model, prompt, response):
    """Log-probs of a response without padding, cache or PAD."""
    logits = model(torch.tensor([[*prompt, *response]]), use_cache=False).logits[0, len(prompt) - 1 : -1].float()
    logits = logits.index_fill(1, torch.tensor([0]), -torch.inf)
    return logits.log_softmax(-1).gather(1, torch.tensor(response)[:, None])[:, 0]


def test_every_tested_architecture_is_compared():
    assert {architecture for architecture, _, sharing in ARCHITECTURES.values() if sharing != "none"} == set(TESTED)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_log_probs_and_gradients_are_those_of_plain_eager_passes(name):
    *_, sharing = ARCHITECTURES[name]
    model = model_of(name, "eager" if sharing == "none" else "sdpa")
    assert sharing_of(model.config, ModelConfig()) == sharing
    use_fast_attention(model, CPU)
    policy = Policy(model, None, None, (1,), 0, sharing=sharing)
    start = {"few positions": 2, "long window": 330}.get(name, 40)
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(3, 70, (start + 9,), generator=generator).tolist()
    prompts = [tokens[: start + 1], [*tokens[:start], 5, 9, 7], [*tokens[:start], *tokens[-7:]][: start + 5]]
    new = 4 if name == "few positions" else 10
    responses = torch.randint(3, 70, (6, new), generator=generator)
    found = response_log_probs(policy, prompts, responses, temperature=1.0)
    found.sum().backward()
    gradient = {key: p.grad for key, p in model.named_parameters() if p.grad is not None}
    plain = model_of(name, "eager")
    plain.load_state_dict(model.state_dict())
    total = 0.0
    for row, response in enumerate(responses.tolist()):
        log_probs = alone(plain, prompts[row // 2], response)
        torch.testing.assert_close(found[row].detach(), log_probs.detach(), atol=1e-4, rtol=1e-4)
        total = total + log_probs.sum()
    total.backward()
    expected = {key: p.grad for key, p in plain.named_parameters() if p.grad is not None}
    assert gradient.keys() == expected.keys()
    difference = sum(float((gradient[key] - g).square().sum()) for key, g in expected.items())
    assert difference**0.5 <= 1e-4 * sum(float(g.square().sum()) for g in expected.values()) ** 0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("factor", "refused"), [(1.0, False), (3.0, True)])
def test_a_sampler_that_differs_from_plain_passes_is_refused(factor, refused, dtype):
    policy = Policy(model_of("bloom", "eager").to(dtype), None, None, (1,), 0, dtype, sharing="none")
    object.__setattr__(policy.lm_head, "factor", factor)  # an architecture that scales its logits elsewhere
    if not refused:
        check_sampler(policy)
        return
    with pytest.raises(ValueError, match="cannot be sampled"):
        check_sampler(policy)


def written(directory, architecture, own):
    """A model directory of this architecture with a tokenizer."""
    tokenizer = kinds.qwen_like()
    config = config_of(architecture, {**own, "vocab_size": len(tokenizer)})
    torch.manual_seed(0)
    make = AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM
    model = make.from_config(config)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


@pytest.mark.parametrize(
    ("name", "attention", "used", "lines"),
    [
        ("llama", "sdpa", "sdpa", 0),
        ("llama", "eager", "eager", 0),
        ("gptj", "sdpa", "eager", 1),  # transformers has no sdpa for it
        ("gemma2", "sdpa", "eager", 1),  # sdpa would drop its soft cap
    ],
)
def test_an_architecture_that_is_not_tested_is_named_and_computed_by_eager_attention(
    name, attention, used, lines, tmp_path, capsys
):
    architecture, own, sharing = ARCHITECTURES[name]
    policy = load_policy(written(tmp_path / "model", architecture, own), ModelConfig(attention=attention), CPU)
    assert policy.model.config._attn_implementation.partition("_")[0] == used  # noqa: SLF001  # transformers has no other
    assert policy.sharing == sharing
    shown = capsys.readouterr().err
    said = [line for line in shown.splitlines() if line and not line.endswith("it/s]")]  # bars of transformers 5
    assert (len(said), name in shown) == (lines, lines == 1)


def test_the_text_part_of_a_model_that_also_sees_is_trained(tmp_path):
    text = config_of("gemma3_text", {**WINDOW, "vocab_size": len(kinds.qwen_like())}).to_dict()
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"image_size": 28, "patch_size": 14}
    own = dict.fromkeys(_COMMON, ...) | {"text_config": text, "vision_config": vision, "mm_tokens_per_image": 1}
    path = written(tmp_path / "model", "gemma3", own)
    assert json.loads((path / "config.json").read_text())["model_type"] == "gemma3"
    assert load_policy(path, ModelConfig(), CPU).sharing == "prompts"


@pytest.mark.skipif(not __version__.startswith("4."), reason="transformers 5 computes Gemma 3n correctly")
def test_a_model_that_a_cache_changes_is_refused_by_its_key(tmp_path):
    own = {**_GEMMA3N, **WINDOW, "activation_sparsity_pattern": None}
    own["vocab_size_per_layer_input"] = len(kinds.qwen_like())
    path = written(tmp_path / "model", "gemma3n_text", own)
    with pytest.raises(ConfigError, match=r"model\.path=.*Gemma3n"):
        load_policy(path, ModelConfig(), CPU)
