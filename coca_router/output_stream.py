"""Text in chunks: read and remove the confidence, and end the answer at the client's stop strings and token limit.

The result does not depend on how the text is cut into chunks.
"""

import functools
from collections.abc import Awaitable, Callable, Sequence
from typing import Literal

import regex

from coca_mindspeed.algorithm.parsing import END_THINK_TAG, THINK_TAG, ResponseParser

_BLANK = regex.compile(r"\A(?:\s*\n|\s+)")
_OPENING = regex.compile(rf"\s*{THINK_TAG}\n?")
MAX_CHARACTERS = 512  # longest confidence segment, white space included


@functools.cache
def _grammar(decimals: int | None, thinking: bool) -> regex.Pattern[str]:
    return regex.compile(ResponseParser(decimals=decimals, thinking=thinking).grammar)


class ConfidenceReader:
    """Reads the confidence of one response by the grammar of :class:`ResponseParser`, matched partially.

    Attributes:
        state: ``reading`` while the text can still become a confidence; ``invalid`` at its first wrong character.
        confidence: s in [0, 1] once the state is ``valid``, else None.
    """

    def __init__(self, decimals: int | None = None, thinking: bool = False) -> None:
        """``decimals`` and ``thinking`` as of :class:`ResponseParser`."""
        self._grammar = _grammar(decimals, thinking)
        self._held = ""
        self.state: Literal["reading", "valid", "invalid"] = "reading"
        self.confidence: float | None = None

    def feed(self, text: str) -> str:
        """Add a chunk and return the answer's text in it; all text of an invalid response is its answer."""
        if self.state != "reading":
            return text
        self._held += text
        match = self._grammar.match(self._held, partial=True)
        if match is not None and match.partial and len(self._held) <= MAX_CHARACTERS:
            return ""
        if match is None or match.partial or match.end() > MAX_CHARACTERS:
            return self.finish()
        self.state, self.confidence = "valid", float(match[1])
        return self._held[match.end() :]

    def finish(self) -> str:
        """End the response; if it is still being read, it is invalid, and its text is returned."""
        if self.state != "reading":
            return ""
        self.state = "invalid"
        return self._held


class ThoughtSplitter:
    """Splits the text behind a confidence into thought and answer.

    An engine sends the thought in a field of its own (a reasoning parser), or both in one text around ``</think>``.

    Attributes:
        is_open: whether the thought goes on; a text that does not end it has no answer.
        has_field: whether the engine has a field for the thought.
    """

    def __init__(self) -> None:
        self.is_open = True
        self.has_field = False
        self._opening: str | None = ""  # the thought's first characters while they may be its opening tag
        self._end = StopStrings([END_THINK_TAG])

    def feed(self, thought: str, text: str) -> tuple[str, str]:
        """Add the ``thought`` that an engine names as such, and other ``text``; return parts of thought and answer."""
        self.has_field |= bool(thought)
        if not self.is_open:
            return thought, text
        answer = ""
        if not self.has_field:
            thought = self._end.feed(text)
            self.is_open, answer = not self._end.stopped, self._end.rest
        else:
            thought, answer, self.is_open = self._end.finish() + thought, text, not text
        return self._without_opening(thought, last=not self.is_open), answer

    def finish(self) -> str:
        """End the text, and return what was held back of a thought that did not end."""
        return self._without_opening(self._end.finish(), last=True) if self.is_open else ""

    def _without_opening(self, thought: str, *, last: bool) -> str:
        if self._opening is None:
            return thought
        self._opening += thought
        match = _OPENING.match(self._opening, partial=not last)
        if match is not None and match.partial:
            return ""
        thought, self._opening = self._opening[match.end() if match else 0 :], None
        return thought


class StopStrings:
    """Ends a text at the first of several non-empty strings; holds back text that may begin one.

    Text fed after ``stopped`` is dropped; ``rest`` is the text behind the string in the chunk that stopped it.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = self.rest = ""
        self.stopped = False

    def feed(self, text: str) -> str:
        """Add text and return the part that is certainly output."""
        if self.stopped:
            return ""
        if not self._stops:
            return text
        self._held += text
        places = [(place, stop) for stop in self._stops if (place := self._held.find(stop)) >= 0]
        if places:
            # The string that is complete first ends the text, as it would token by token.
            place, stop = min(places, key=lambda pair: (pair[0] + len(pair[1]), pair[0]))
            self.stopped, self.rest = True, self._held[place + len(stop) :]
            return self._held[:place]
        certain = len(self._held) - max(self._overlap(stop) for stop in self._stops)
        output, self._held = self._held[:certain], self._held[certain:]
        return output

    def finish(self) -> str:
        """End the text and return the part that was held back."""
        held, self._held = ("" if self.stopped else self._held), ""
        return held

    def _overlap(self, stop: str) -> int:
        longest = min(len(stop) - 1, len(self._held))
        return next((size for size in range(longest, 0, -1) if self._held.endswith(stop[:size])), 0)


class OutputStream:
    """The answer's text without its confidence, ended by the client's stop strings and token limit.

    The engine does not get the stop strings, since it would find them in the confidence too.

    Attributes:
        tokens: tokens of the answer.
        finish_reason: None until the answer has ended.
        cut: whether a limit of the client ended it, not the engine.
    """

    def __init__(self, write: Callable[[str], Awaitable[None]], stops: Sequence[str], max_tokens: int | None) -> None:
        """``max_tokens`` None: the engine's limit."""
        self._write, self._stops, self._max_tokens = write, StopStrings(stops), max_tokens
        self.tokens, self.cut = 0, False
        self.finish_reason: str | None = None
        self._blank: str | None = None

    def begin_after_confidence(self) -> None:
        """Drop the white space between the confidence and the answer, but not the indentation of its first line."""
        self._blank = ""

    async def feed(self, text: str, tokens: int, finish_reason: str | None) -> None:
        """Send the text that is certain."""
        if self.finish_reason is not None:
            return
        self.tokens += tokens
        if self._blank is not None:
            self._blank += text
            text = _BLANK.sub("", self._blank) if self._blank.strip() else ""
            self._blank = None if text else self._blank
        certain = self._stops.feed(text)
        if self._stops.stopped:
            self.finish_reason, self.cut = "stop", True
        elif finish_reason is not None:
            self.finish_reason = finish_reason
        elif self._max_tokens is not None and self.tokens >= self._max_tokens:
            self.finish_reason, self.cut = "length", True
        await self._write(certain)

    async def close(self) -> None:
        await self._write(self._stops.finish())
