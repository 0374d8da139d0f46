"""Hugging Face tokenizers: loading, and the bytes of each token."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coca_mindspeed.algorithm.parsing import CLOSE_TAG, OPEN_TAG, ParsedResponse, ResponseParser
from coca_mindspeed.errors import ConfigError, DataError

if TYPE_CHECKING:
    from coca_mindspeed.algorithm.boundary import TokenText

_BYTE_FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def load_tokenizer(directory: Path) -> Any:
    """Load a local Hugging Face tokenizer without running its code; raises DataError if there is none."""
    from transformers import AutoTokenizer

    if not directory.is_dir():
        raise DataError(f"{directory}: no such directory; expected one with tokenizer.json and tokenizer_config.json")
    try:
        return AutoTokenizer.from_pretrained(str(directory), local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise DataError(f"{directory}: transformers cannot load a tokenizer from it: {error}") from error


def token_text(tokenizer: Any, vocabulary_size: int) -> TokenText:
    """Return the bytes of each id of a ``PreTrainedTokenizerFast``.

    Special tokens have no text, unless the confidence tags were added as such; nor has an id that only the model knows,
    whose output layer often has more rows (``vocabulary_size``).  Raises ConfigError if the tokenizer is slow, or its
    decoder has no bytes per token.
    """
    from coca_mindspeed.algorithm.boundary import TokenText  # imports torch

    backend = getattr(tokenizer, "backend_tokenizer", None)
    name = getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__
    if backend is None:
        raise ConfigError(f"tokenizer {name}: a fast tokenizer (tokenizer.json) is needed, found a slow one")
    kinds = _decoder_kinds(json.loads(backend.to_str())["decoder"])
    if "ByteLevel" in kinds:
        to_bytes = _byte_level
    elif kinds <= {"Metaspace", "Replace", "ByteFallback", "Fuse", "Strip"} and kinds:
        to_bytes = _sentence_piece
    else:
        raise ConfigError(
            f"tokenizer {name}: its decoder {sorted(kinds) or 'null'} does not give every token text of its own; "
            "supported are byte-level BPE, SentencePiece-style and plain (Fuse) decoders"
        )
    table = [b""] * max(vocabulary_size, len(tokenizer))
    for token, index in tokenizer.get_vocab().items():
        table[index] = to_bytes(token)
    for index, added in tokenizer.added_tokens_decoder.items():
        hidden = added.special and added.content.strip() not in (OPEN_TAG, CLOSE_TAG)
        table[index] = b"" if hidden else added.content.encode("utf-8")
    return TokenText(table)


def _decoder_kinds(decoder: dict[str, Any] | None) -> set[str]:
    if decoder is None:
        return set()
    if decoder["type"] == "Sequence":
        return set().union(*map(_decoder_kinds, decoder["decoders"]))
    return {decoder["type"]}


# Characters by which byte-level BPE writes bytes: printable Latin-1 as itself, the others from U+0100 on.
_PRINTABLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_OTHERS = (byte for byte in range(256) if byte not in _PRINTABLE)
_BYTE_OF_CHARACTER = {chr(b): b for b in _PRINTABLE} | {chr(256 + i): byte for i, byte in enumerate(_OTHERS)}


def _byte_level(token: str) -> bytes:
    try:
        return bytes(_BYTE_OF_CHARACTER[character] for character in token)
    except KeyError:  # a token outside of the alphabet was added as plain text
        return token.encode("utf-8")


def _sentence_piece(token: str) -> bytes:
    if match := _BYTE_FALLBACK.fullmatch(token):
        return bytes([int(match[1], 16)])
    return token.replace("▁", " ").encode("utf-8")


class TokenCounter:
    """Counts tokens of a served model's text with the fast tokenizer in ``path``; DataError if there is none."""

    def __init__(self, path: Path) -> None:
        self._tokenizer = load_tokenizer(path)
        if not self._tokenizer.is_fast:
            raise DataError(f"tokenizer {path}: has no tokenizer.json, which counting tokens up to a character needs")

    def before(self, text: str, end: int) -> int:
        """Return the number of tokens of ``text`` that begin before character ``end``."""
        encoding = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        return sum(start < end for start, _ in encoding["offset_mapping"])


def parse_and_count(
    text: str, parser: ResponseParser, counter: TokenCounter | None
) -> tuple[ParsedResponse, int | None]:
    """Parse a response, and count its tokens to confidence; None without a valid confidence or without ``counter``."""
    parsed = parser(text)
    if parsed.confidence is None or counter is None:
        return parsed, None
    # The index after the closing tag.
    first = re.match(parser.grammar, text) if parser.position != "last" else None
    end = first.end() if first else len(text.rstrip())
    return parsed, counter.before(text, end)
