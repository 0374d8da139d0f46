"""Build a byte-level BPE tokenizer from the metadata of a GGUF file.

The file names its pre-tokenizer in ``tokenizer.ggml.pre``.  Transformers ignores the name and builds a SentencePiece
tokenizer, which splits text differently and loses characters.  Unknown names are refused.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from coca_mindspeed.errors import DataError


class TokenType(IntEnum):
    """Values of ``tokenizer.ggml.token_type``."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True)
class PreTokenizer:
    """Text processing of a family of models before BPE.

    Attributes:
        pre_tokenizer: splits text and maps the parts to bytes.
        normalizer: of the text before that.
        ignore_merges: a part that is a token is not merged from smaller tokens.
        add_bos: add the BOS token if the file does not say.
    """

    pre_tokenizer: Callable[[], Any]
    normalizer: Callable[[], Any] | None = None
    ignore_merges: bool = False
    add_bos: bool = False


def _gpt4(digits: str) -> Any:
    """GPT-4's pattern (contractions, words, digits, signs, white space) with another pattern for digits."""
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
        + digits
        + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _digits_then_gpt2() -> Any:
    digits = pre_tokenizers.Digits(individual_digits=True)
    return pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)])


_LLAMA3 = PreTokenizer(lambda: _gpt4(r"\p{N}{1,3}"), ignore_merges=True, add_bos=True)
PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {
    "smollm": PreTokenizer(_digits_then_gpt2),
    "qwen2": PreTokenizer(lambda: _gpt4(r"\p{N}"), normalizer=normalizers.NFC),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
}
_NAMED = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}


def build_tokenizer(metadata: Mapping[str, Any], path: Path) -> PreTrainedTokenizerFast:
    """Build the fast tokenizer with its special tokens and chat template.

    The EOS token is the token that ends an assistant's turn in the chat template, if the file has a template.

    Raises:
        DataError: another kind of tokenizer, an unknown pre-tokenizer, or inconsistent lists; ``path`` is named.
    """
    if (kind := metadata.get("tokenizer.ggml.model")) != "gpt2":
        raise DataError(f"{path}: tokenizer.ggml.model is {kind!r:.80}; expected 'gpt2' (byte-level BPE)")
    if (pre := str(metadata.get("tokenizer.ggml.pre"))) not in PRE_TOKENIZERS:
        known = ", ".join(PRE_TOKENIZERS)
        raise DataError(f"{path}: tokenizer.ggml.pre is {pre!r:.80}; supported: {known}")
    family = PRE_TOKENIZERS[pre]
    tokens, types = _tokens(metadata, path)
    tokenizer = Tokenizer(_model(tokens, types, _merges(metadata, path), family, path))
    tokenizer.pre_tokenizer = family.pre_tokenizer()
    tokenizer.decoder = decoders.ByteLevel()
    if family.normalizer is not None:
        tokenizer.normalizer = family.normalizer()
    for token, kind in zip(tokens, types, strict=True):
        if kind in (TokenType.CONTROL, TokenType.UNKNOWN):
            tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False)])
        elif kind == TokenType.USER_DEFINED:
            tokenizer.add_tokens([AddedToken(token, special=False, normalized=False)])
    named = _named_tokens(metadata, tokens, path)
    if metadata.get("tokenizer.ggml.add_bos_token", family.add_bos) and "bos_token" in named:
        bos = named["bos_token"]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, tokens.index(bos))]
        )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
        **named,
    )
    if (template := metadata.get("tokenizer.chat_template")) is not None:
        if not isinstance(template, str):
            raise DataError(f"{path}: tokenizer.chat_template should be text, found {template!r:.80}")
        fast.chat_template = template
        if (end := _end_of_turn(fast, path)) is not None:
            fast.eos_token = end
    return fast


def _tokens(metadata: Mapping[str, Any], path: Path) -> tuple[list[str], list[int]]:
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not all(isinstance(token, str) and token for token in tokens):
        raise DataError(f"{path}: tokenizer.ggml.tokens should be a list of strings that are not empty")
    if len(set(tokens)) != len(tokens):
        seen: set[str] = set()
        twice = next(token for token in tokens if token in seen or seen.add(token))  # type: ignore[func-returns-value]
        raise DataError(f"{path}: tokenizer.ggml.tokens has {twice!r:.80} twice")
    types = metadata.get("tokenizer.ggml.token_type")
    kinds = [] if types is None or isinstance(types, (str, int, float)) else [*types]
    if len(kinds) != len(tokens) or not set(kinds) <= set(TokenType):
        raise DataError(
            f"{path}: tokenizer.ggml.token_type should give each of the {len(tokens)} tokens a type from 1 to 6"
        )
    return tokens, [int(kind) for kind in kinds]


def _merges(metadata: Mapping[str, Any], path: Path) -> list[tuple[str, str]]:
    merges = metadata.get("tokenizer.ggml.merges")
    if not isinstance(merges, list):
        raise DataError(f"{path}: tokenizer.ggml.merges should be a list of strings, found {merges!r:.80}")
    pairs = []
    for merge in merges:
        left, space, right = str(merge).partition(" ")
        if not (left and space and right) or " " in right:
            raise DataError(f"{path}: tokenizer.ggml.merges: expected two tokens and a space, found {merge!r:.80}")
        pairs.append((left, right))
    return pairs


def _model(
    tokens: list[str], types: list[int], merges: list[tuple[str, str]], family: PreTokenizer, path: Path
) -> models.BPE:
    # Unused tokens pad the vocabulary and have no text.  SmolLM2's vocabulary lacks 21 of the 256 bytes; its own
    # tokenizer drops them too.
    vocabulary = {token: i for i, token in enumerate(tokens) if types[i] != TokenType.UNUSED}
    for left, right in merges:
        for token in (left, right, left + right):
            if token not in vocabulary:
                raise DataError(f"{path}: tokenizer.ggml.merges: {left!r} and {right!r}: {token!r:.80} is not a token")
    return models.BPE(vocab=vocabulary, merges=merges, ignore_merges=family.ignore_merges, byte_fallback=False)


def _named_tokens(metadata: Mapping[str, Any], tokens: list[str], path: Path) -> dict[str, str]:
    named = {}
    for key, name in _NAMED.items():
        place = f"tokenizer.ggml.{key}_token_id"
        if (index := metadata.get(place)) is None:
            continue
        if type(index) is not int or not 0 <= index < len(tokens):
            raise DataError(f"{path}: {place} should be from 0 to {len(tokens) - 1}, found {index!r:.80}")
        named[name] = tokens[index]
    return named


def _end_of_turn(tokenizer: PreTrainedTokenizerFast, path: Path) -> str | None:
    """The first special token after an assistant's message in the chat template; None without one."""
    said = "an assistant says"
    chat = [{"role": "user", "content": "a user asks"}, {"role": "assistant", "content": said}]
    try:
        text = str(tokenizer.apply_chat_template(chat, tokenize=False))
    except Exception as error:  # a template may raise anything
        raise DataError(f"{path}: tokenizer.chat_template fails: {error!s:.300}") from error
    behind = text.rpartition(said)[2]
    ends = {added.content for added in tokenizer.added_tokens_decoder.values() if added.special}
    found = {behind.find(end): end for end in ends if end in behind}
    return found[min(found)] if found else None
