"""Reading a confidence while it arrives, in pieces of text.

The grammar is that of :class:`ResponseParser`: what has come so far is matched against the same expression, and a
partial match says that it can still become a confidence.  So the answer to any way of cutting a response into pieces
is that of the whole text, and an invalid response is known at its first wrong character.
"""

from functools import lru_cache
from typing import Literal

import regex

from coca_mindspeed.algorithm.response import ResponseParser

ReaderState = Literal["reading", "valid", "invalid"]

# The longest that a confidence may take, white space and digits included; a model that never closes its tag is
# invalid then, and what is held back stays small.
MAX_CHARACTERS = 512


class ConfidenceReader:
    """The confidence of one response whose text comes in pieces.

    Attributes:
        state: ``reading`` while what has come can still become a confidence.
        confidence: s in [0, 1] once the state is ``valid``, else None.
    """

    def __init__(self, parser: ResponseParser | None = None, max_characters: int = MAX_CHARACTERS) -> None:
        """Begin.

        Args:
            parser: of confidence-first responses; an answer-first one is known only when it has ended.
            max_characters: a confidence that has not ended after so many is invalid.
        """
        parser = parser or ResponseParser()
        if parser.position != "first":
            raise ValueError("a confidence that stands last is known only at the end; use ResponseParser on the whole")
        self._pattern = _compiled(parser.grammar)
        self._held = ""
        self._limit = max_characters
        self.state: ReaderState = "reading"
        self.confidence: float | None = None

    def feed(self, text: str) -> str:
        """Read a piece, and return the answer's text that is known by now.

        Empty while reading.  Of an invalid response everything is answer, also what was held back until then.
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
        """The response has ended; returns what was still held back, which is an invalid response's text."""
        if self.state == "reading":
            self.state = "invalid"
        held, self._held = self._held, ""
        return held


@lru_cache
def _compiled(grammar: str) -> regex.Pattern[str]:
    """The expression; ``regex`` itself takes longer to look one up than a piece takes to match."""
    return regex.compile(grammar)
