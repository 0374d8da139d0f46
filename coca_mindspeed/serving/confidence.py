"""Read a confidence from a streamed response, and average several.

The grammar is that of :class:`ResponseParser`: the text received so far is matched against the same expression, and a
partial match can still become a confidence.  The result does not depend on how a response is cut into chunks, and an
invalid response is known at its first wrong character.
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Literal

import regex

from coca_mindspeed.algorithm.parsing import ResponseParser

ReaderState = Literal["reading", "valid", "invalid"]

# Longest confidence segment, white space included: a model that never closes its tag is invalid from here on.
MAX_CHARACTERS = 512


class ConfidenceReader:
    """The confidence of one response that arrives in chunks.

    Attributes:
        state: ``reading`` while the text can still become a confidence.
        confidence: s in [0, 1] once the state is ``valid``, else None.
    """

    def __init__(self, parser: ResponseParser | None = None, max_characters: int = MAX_CHARACTERS) -> None:
        """Start with no text.

        Args:
            parser: of confidence-first responses.
            max_characters: a longer confidence segment is invalid.
        """
        parser = parser or ResponseParser()
        if parser.position != "first":
            raise ValueError("a confidence that stands last is known only at the end; use ResponseParser")
        self._pattern = _compiled(parser.grammar)
        self._held = ""
        self._limit = max_characters
        self.state: ReaderState = "reading"
        self.confidence: float | None = None

    def feed(self, text: str) -> str:
        """Read a chunk and return the answer's text in it.

        The text is empty while reading.  All of an invalid response is answer, the text held back included.
        """
        if self.state != "reading":
            return text
        self._held += text
        match = self._pattern.match(self._held, partial=True)
        if match is not None and match.partial and len(self._held) <= self._limit:
            return ""
        held, self._held = self._held, ""
        if match is None or match.partial or match.end() > self._limit:
            self.state = "invalid"
            return held
        self.state, self.confidence = "valid", float(match[1])
        return held[match.end() :]

    def finish(self) -> str:
        """End the response; returns the text held back, which is an invalid response's."""
        if self.state == "reading":
            self.state = "invalid"
        held, self._held = self._held, ""
        return held


@lru_cache
def _compiled(grammar: str) -> regex.Pattern[str]:
    """The compiled grammar; a look-up in ``regex`` takes longer than the match of a chunk."""
    return regex.compile(grammar)


def mean_confidence(stated: Sequence[float | None]) -> float | None:
    """The mean of several stated confidences; None where fewer than half of them are valid.

    Rounded to 12 digits, so that the mean of equal confidences is that confidence and stays in its band.
    """
    valid = [s for s in stated if s is not None]
    return round(math.fsum(valid) / len(valid), 12) if valid and 2 * len(valid) >= len(stated) else None
