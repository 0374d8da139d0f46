"""Small tokenizers of the kinds that real models have, trained on a few lines of text."""

import json
from functools import cache

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

# How GPT-4-style tokenizers cut text before BPE: this is what merges a final ">" with the newline behind it.
_QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3_SPLIT = _QWEN_SPLIT.replace(r"|\p{N}|", r"|\p{N}{1,3}|")

_CORPUS = [
    "<confidence> 0.85 </confidence>\nLet me think. The answer is \\boxed{42}.",
    "<confidence>0.5</confidence>\n\nStep 1: x > 3\n so y >\nz",
    "</confidence>\n</confidence>\n\n>\n>\n >\n\n confidence confidence",
    "数学题：求和 1+2 = 3。答案是三。émigré naïve 🙂🙃 0.123 0.99 100",
] * 4

QWEN_TEMPLATE = (
    "{%- for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{%- endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{%- endif %}"
)
#: Opens a thinking block behind the prompt, unless the template's variable ``thinking`` is "off".
THINKING_TEMPLATE = QWEN_TEMPLATE + "{% if add_generation_prompt and thinking != 'off' %}<think>{% endif %}"
LLAMA3_TEMPLATE = (
    "<|begin_of_text|>{%- for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content }}"
    "<|eot_id|>{%- endfor %}"
    "{%- if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{%- endif %}"
)


def _byte_level_bpe(split: str, special: list[str], vocab_size: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(byte_fallback=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(split), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return tokenizer


@cache
def qwen_like(vocab_size: int = 400) -> PreTrainedTokenizerFast:
    """Byte-level BPE with Qwen2's cuts, special tokens and chat layout; digits one by one."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=_byte_level_bpe(_QWEN_SPLIT, ["<|endoftext|>", "<|im_start|>", "<|im_end|>"], vocab_size),
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
    )
    tokenizer.chat_template = QWEN_TEMPLATE
    return tokenizer


@cache
def llama3_like(vocab_size: int = 400) -> PreTrainedTokenizerFast:
    """Byte-level BPE with Llama 3's cuts (digits in threes) and chat layout; no padding token, as published."""
    special = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=_byte_level_bpe(_LLAMA3_SPLIT, special, vocab_size),
        bos_token="<|begin_of_text|>",
        eos_token="<|eot_id|>",
    )
    tokenizer.chat_template = LLAMA3_TEMPLATE
    return tokenizer


@cache
def sentence_piece_like() -> PreTrainedTokenizerFast:
    """Llama-2 style: metaspace, characters, and bytes for what it does not know."""
    characters = sorted(set("".join(_CORPUS[:3])) - {" ", "\n"})
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *characters]
    vocabulary = {token: index for index, token in enumerate(dict.fromkeys(tokens))}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", bos_token="<s>")


@cache
def character_level() -> PreTrainedTokenizerFast:
    """One token a character, joined without anything between."""
    characters = [*dict.fromkeys("".join(_CORPUS)), "<eos>"]
    tokenizer = Tokenizer(models.WordLevel({c: i for i, c in enumerate(characters)}, unk_token="<eos>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")


@cache
def tags_as_special_tokens() -> PreTrainedTokenizerFast:
    """The confidence tags added to the vocabulary, as a special and as an ordinary token."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(json.loads(qwen_like().backend_tokenizer.to_str()))),
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
    )
    tokenizer.add_tokens([AddedToken("<confidence>", special=True), AddedToken("</confidence>", special=False)])
    return tokenizer


ALL = {
    "qwen_like": qwen_like,
    "llama3_like": llama3_like,
    "sentence_piece_like": sentence_piece_like,
    "character_level": character_level,
    "tags_as_special_tokens": tags_as_special_tokens,
}
