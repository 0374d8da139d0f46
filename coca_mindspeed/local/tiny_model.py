"""The built-in tiny model: a Qwen2 of about 110,000 parameters that learns arithmetic in a minute on a CPU.

It is written as a plain Hugging Face directory and loaded like any other model.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from coca_mindspeed.algorithm.parsing import CLOSE_TAG, OPEN_TAG
from coca_mindspeed.data.prompts import NO_SYSTEM_PROMPT, instruction_suffix
from coca_mindspeed.data.records import Record
from coca_mindspeed.errors import DataError

PAD, EOS = "<pad>", "<eos>"
_TOKENS = [PAD, EOS, OPEN_TAG, CLOSE_TAG, ".", "=", "+", "*", "%", *"0123456789"]

# The tiny model has no letters: its prompt is the question and an equals sign, without a system prompt.
_CHAT_TEMPLATE = NO_SYSTEM_PROMPT + "{%- for m in messages if m.role == 'user' %}{{ m.content }}{%- endfor %}="


def tiny_tokenizer(symbols: Sequence[str] = "") -> PreTrainedTokenizerFast:
    """One token per character, one per confidence tag, and one for each of ``symbols``: characters, or other tags."""
    tokens = [*_TOKENS, *symbols]
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token=PAD))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in (PAD, EOS)])
    # Added tokens survive loading: transformers 5 rebuilds the rest by model type.
    tags = [symbol for symbol in symbols if len(symbol) > 1]
    tokenizer.add_tokens([AddedToken(tag, normalized=False) for tag in (OPEN_TAG, CLOSE_TAG, *tags)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        chat_template=_CHAT_TEMPLATE,
        padding_side="left",
        model_input_names=["input_ids", "attention_mask"],  # generate() refuses token_type_ids
    )


def check_readable(records: Iterable[Record]) -> None:
    """Raise DataError for questions and answers with characters that the tiny model does not know."""
    known = {token for token in _TOKENS if len(token) == 1}
    for record in records:
        for name, text in (("question", record.question + instruction_suffix(record)), ("answer", record.answer)):
            if unknown := [character for character in text if character not in known]:
                raise DataError(
                    f"{record.name}: the built-in tiny model cannot read {unknown[0]!r} in "
                    f"its {name}; it knows only {''.join(sorted(known))}; set model.path to another model"
                )
        if not any(character.isdecimal() for character in record.answer):
            raise DataError(
                f"{record.name}: the built-in tiny model's warm-up needs an answer with a "
                f"digit, found {record.answer!r}; set model.path to another model"
            )


def tiny_config(symbols: Sequence[str] = "") -> Qwen2Config:
    """Hidden size 64, two layers, four heads; the vocabulary of :func:`tiny_tokenizer`."""
    return Qwen2Config(
        vocab_size=len(_TOKENS) + len(symbols),
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=128,
        # Texts have thirty tokens and layers are 64 wide: with the slow rotations and small weights of large models,
        # neighbouring positions would look alike and the first hundred steps would have no effect.
        rope_theta=100.0,
        initializer_range=0.08,
        tie_word_embeddings=True,
        pad_token_id=_TOKENS.index(PAD),
        eos_token_id=_TOKENS.index(EOS),
        bos_token_id=None,
    )


def write_tiny_model(directory: Path, seed: int, symbols: Sequence[str] = "") -> None:
    """Write an untrained tiny model that also knows ``symbols``; the global random state is not changed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(tiny_config(symbols))
    model.generation_config.pad_token_id = _TOKENS.index(PAD)
    model.generation_config.eos_token_id = _TOKENS.index(EOS)
    model.save_pretrained(directory)
    tiny_tokenizer(symbols).save_pretrained(directory)
