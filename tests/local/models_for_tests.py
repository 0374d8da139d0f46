"""Small random models of the architectures that users have, written as plain Hugging Face directories."""

import json
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from coca_mindspeed.config.schema import ModelConfig
from coca_mindspeed.local import lm_head
from coca_mindspeed.local.inverse_cdf import check_drawn, numbers_per_draw, tokens_at
from coca_mindspeed.local.load import checkpoint_activations
from coca_mindspeed.local.model_files import load_model_tokenizer
from coca_mindspeed.local.policy import Policy
from coca_mindspeed.local.prompt_checks import check_prompts
from coca_mindspeed.local.update import ResponseBatch
from tests import tokenizers_for_tests as kinds

_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
SHAPE = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, **_HEADS}


def write_random_model(directory: Path, architecture: str, seed: int = 0) -> Path:
    """A random Qwen2 or Llama with its byte-level BPE tokenizer and chat template; the vocabulary is padded."""
    torch.manual_seed(seed)
    shape = {**SHAPE, "max_position_embeddings": 512}
    if architecture == "qwen2":
        tokenizer = kinds.qwen_like()
        model = Qwen2ForCausalLM(Qwen2Config(vocab_size=len(tokenizer) + 11, tie_word_embeddings=True, **shape))
    else:
        tokenizer = kinds.llama3_like()
        model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer) + 11, tie_word_embeddings=False, **shape))
    with torch.no_grad():  # random weights are nearly uniform; make the logits matter
        for parameter in model.parameters():
            parameter.mul_(3.0)
    # Many end tokens, so that random responses end at many lengths.
    letters = tokenizer.convert_tokens_to_ids(list("aeioubcdfghklmn"))
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, *letters]
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def set_config(model: Path, directory: Path, **values) -> Path:
    """A copy of ``model`` with other settings in its config.json."""
    directory.mkdir()
    for file in model.iterdir():
        (directory / file.name).write_bytes(file.read_bytes())
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, **values}))
    return directory


def set_chunk_of(monkeypatch, tokens, vocabulary):
    """Let the output layer of a model with such a vocabulary take so many tokens at a time."""
    monkeypatch.setattr(lm_head, "CHUNK_BYTES", 4 * vocabulary * tokens)
    monkeypatch.setattr(lm_head, "LEAST_CHUNK", 1)


_RANDOM_SHAPE = {**SHAPE, "vocab_size": 61, "num_hidden_layers": 4, "pad_token_id": 0}


def random_policy(architecture, *, recompute, dtype=torch.float32):
    torch.manual_seed(0)
    # Every other layer of Gemma 2 sees five tokens only; GPT-2's take the cache without a name, GPT-NeoX's by another.
    own = {"head_dim": 8, "sliding_window": 5} if architecture == "gemma2" else {}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(architecture, **_RANDOM_SHAPE, **own)).eval()
    if recompute:
        checkpoint_activations(model)
    sharing = "prompts" if own else "prefix"  # a window would count padding behind a prefix
    return Policy(model, None, None, (1,), 0, dtype, sharing=sharing)


def response_log_probs(policy, prompts, token_ids, *, temperature, share_prompts=True):
    return ResponseBatch(policy, prompts, token_ids, temperature, share_prompts).scores().log_probs


def check_model(path: Path, model: ModelConfig, *prompts, **options) -> None:
    """The checks of prompts with the tokenizer in ``path``."""
    check_prompts(load_model_tokenizer(path, model), path, model, *prompts, **options)


def sample_tokens(probabilities, generator=None, row_of=None):
    """Draw as the sampler does, from probabilities."""
    draws = len(probabilities if row_of is None else row_of)
    numbers = numbers_per_draw(probabilities.shape[1])
    uniform = torch.rand(draws, numbers, generator=generator, device=probabilities.device)
    token, valid = tokens_at(probabilities, uniform, row_of)
    check_drawn(valid)
    return token


class Kept:
    """Bytes of the tensors that a forward pass saves for the backward pass, parameters aside."""

    def __init__(self, model):
        self.sizes, self._own = {}, {p.untyped_storage().data_ptr() for p in model.parameters()}

    def __call__(self, tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._own:
            self.sizes[storage.data_ptr()] = storage.nbytes()
        return tensor
