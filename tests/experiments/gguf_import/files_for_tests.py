"""Tiny GGUF files by gguf's own writer, from Hugging Face models whose answers are known."""

import json
from typing import Any

import gguf
import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from experiments.gguf_import.tokenizer import TokenType
from tests import tokenizers_for_tests as kinds

ROPE_THETA = 50_000.0
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_OUTER = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def smollm_like():
    """GPT-2's cuts after digits one by one; the control tokens come first, as in SmolLM2's vocabulary."""
    tokenizer = kinds._byte_level_bpe(r"\p{N}", [], 300)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in CONTROL],
        show_progress=False,
    )
    tokenizer.train_from_iterator(kinds._CORPUS, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<|im_start|>", eos_token="<|im_end|>", pad_token="<|im_end|>"
    )
    fast.chat_template = kinds.QWEN_TEMPLATE
    return fast


def qwen2_like():
    """As published, Qwen2's tokenizer composes characters first (NFC)."""
    from tokenizers import normalizers

    inner = Tokenizer.from_str(kinds.qwen_like().backend_tokenizer.to_str())
    inner.normalizer = normalizers.NFC()
    inner.add_tokens([AddedToken("<tool_call>", special=False, normalized=False)])
    fast = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    fast.chat_template = kinds.QWEN_TEMPLATE
    return fast


def llama3_like():
    """As published, Llama 3's tokenizer takes a piece that is a token as it stands, without merges."""
    state = json.loads(kinds.llama3_like().backend_tokenizer.to_str())
    state["model"]["ignore_merges"] = True
    inner = Tokenizer.from_str(json.dumps(state))
    fast = PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<|begin_of_text|>", eos_token="<|eot_id|>")
    fast.chat_template = kinds.LLAMA3_TEMPLATE
    return fast


TOKENIZERS = {"smollm": smollm_like, "qwen2": qwen2_like, "llama-bpe": llama3_like}


def random_model(architecture, vocabulary, *, tied, heads=4, groups=2):
    """A random Llama or Qwen2 whose logits are far from uniform."""
    torch.manual_seed(len(architecture) + tied)
    kind, of = {"llama": (LlamaConfig, LlamaForCausalLM), "qwen2": (Qwen2Config, Qwen2ForCausalLM)}[architecture]
    config = kind(
        vocab_size=vocabulary,
        hidden_size=heads * 8,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        max_position_embeddings=512,
        rope_theta=ROPE_THETA,
        rms_norm_eps=2.0**-17,
        tie_word_embeddings=tied,
    )
    model = of(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05).mul_(2.0)
    return model


def write_gguf(path, model, tokenizer, pre, **changed):
    """Write the model and its tokenizer as llama.cpp's converter does.

    Args:
        path: of the file.
        model: from :func:`random_model`.
        tokenizer: its own.
        pre: name of the tokenizer's cuts.
        changed: metadata by its key with dots written as ``__``; None leaves it out.
    """
    config, architecture = model.config, model.config.model_type
    writer = gguf.GGUFWriter(path, architecture)
    entries: dict[str, Any] = {
        f"{architecture}.block_count": config.num_hidden_layers,
        f"{architecture}.context_length": config.max_position_embeddings,
        f"{architecture}.embedding_length": config.hidden_size,
        f"{architecture}.feed_forward_length": config.intermediate_size,
        f"{architecture}.attention.head_count": config.num_attention_heads,
        f"{architecture}.attention.head_count_kv": config.num_key_value_heads,
        f"{architecture}.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        f"{architecture}.rope.freq_base": ROPE_THETA,
        f"{architecture}.vocab_size": config.vocab_size,
        **tokenizer_metadata(tokenizer, config.vocab_size, pre),
    }
    if architecture == "llama":
        entries["llama.rope.dimension_count"] = config.hidden_size // config.num_attention_heads
    entries |= {key.replace("__", "."): value for key, value in changed.items()}
    for key, value in entries.items():
        _add(writer, key, value)
    for name, tensor in tensors(model).items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def smollm_file(path, **changed):
    """A random Llama with SmolLM2's kind of tokenizer, as a GGUF file."""
    tokenizer = smollm_like()
    model = random_model("llama", len(tokenizer), tied=True)
    return write_gguf(path, model, tokenizer, "smollm", **changed)


def _add(writer, key, value):
    if isinstance(value, list):
        writer.add_array(key, value)
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif value is not None:
        writer.add_uint32(key, value)


def tokenizer_metadata(tokenizer, vocabulary, pre):
    """The entries that describe a tokenizer; the vocabulary is padded by unused tokens."""
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    tokens = {index: token for token, index in tokenizer.get_vocab().items()}
    added = {entry["id"]: TokenType.CONTROL if entry["special"] else TokenType.USER_DEFINED
             for entry in state["added_tokens"]}  # fmt: skip
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in state["model"]["merges"]]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [tokens.get(i, f"[PAD{i}]") for i in range(vocabulary)],
        "tokenizer.ggml.token_type": [
            int(added.get(i, TokenType.NORMAL) if i in tokens else TokenType.UNUSED) for i in range(vocabulary)
        ],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.eos_token_id": tokenizer.eos_token_id,
        "tokenizer.ggml.bos_token_id": tokenizer.bos_token_id,
        "tokenizer.ggml.padding_token_id": tokenizer.pad_token_id,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": tokenizer.chat_template,
    }


def tensors(model):
    """Weights under GGUF's names; Llama's queries and keys in the order of its rotary embedding."""
    config, found = model.config, {}
    for key, value in model.state_dict().items():
        stem, _, kind = key.rpartition(".")
        if key == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if stem in _OUTER:
            name = _OUTER[stem]
        else:
            _, _, layer, inner = stem.split(".", 3)
            name = f"blk.{layer}.{_NAMES[inner]}"
        array = value.numpy()
        if config.model_type == "llama" and inner_of(name) in ("attn_q", "attn_k"):
            heads = config.num_attention_heads if name.endswith("attn_q") else config.num_key_value_heads
            # The two halves of each head, which the rotation pairs, become neighbours.
            array = array.reshape(heads, 2, -1, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)
        found[f"{name}.{kind}"] = np.ascontiguousarray(array)
    return found


def inner_of(name):
    """The last part of a tensor's name."""
    return name.rpartition(".")[2]
