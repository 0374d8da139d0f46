"""How many tokens it takes until the confidence is known (TTC), where only text has come back.

Engines of ours count the sampled ids.  A served model returns text, which the model's own tokenizer turns back into
tokens: the count is that of the tokens that begin before the end of the confidence.
"""

from pathlib import Path

from coca_mindspeed.algorithm.parsing import ParsedResponse, ResponseParser
from coca_mindspeed.errors import ConfigError


def confidence_end(text: str, parsed: ParsedResponse, parser: ResponseParser) -> int | None:
    """The character after the confidence's closing tag, or None if the response states no valid confidence."""
    if parsed.confidence is None:
        return None
    return len(text) - len(parsed.answer) if parser.position == "first" else len(text.rstrip())


class TokenCounter:
    """Counts tokens with a Hugging Face tokenizer.

    Args:
        path: a directory with a fast tokenizer; nothing is downloaded and no code of the directory is run.

    Raises:
        ConfigError: there is no fast tokenizer.
    """

    def __init__(self, path: Path) -> None:
        from transformers import AutoTokenizer

        if not path.is_dir():
            raise ConfigError(f"tokenizer {path}: expected a directory with a Hugging Face tokenizer")
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False, local_files_only=True)
        except (OSError, ValueError) as error:
            raise ConfigError(f"tokenizer {path}: cannot be loaded: {error}") from error
        if not self._tokenizer.is_fast:
            raise ConfigError(f"tokenizer {path}: has no tokenizer.json; tokens cannot be counted up to a character")

    def before(self, text: str, end: int) -> int:
        """How many tokens of ``text`` begin before character ``end``."""
        encoding = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        return sum(start < end for start, _ in encoding["offset_mapping"])
