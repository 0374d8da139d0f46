"""Tokens to confidence (TTC) of responses that came back as text.

The engines count sampled ids.  Text of a served model is tokenized again by the model's tokenizer, and the tokens that
begin before the end of the confidence are counted.
"""

from pathlib import Path

from coca_mindspeed.algorithm.parsing import ParsedResponse, ResponseParser
from coca_mindspeed.errors import DataError
from coca_mindspeed.utils.tokenization import load_tokenizer


class TokenCounter:
    """Counts tokens with the fast tokenizer in the directory ``path``; raises ConfigError if there is none."""

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
    end = len(text) - len(parsed.answer) if parser.position == "first" else len(text.rstrip())
    return parsed, counter.before(text, end)
