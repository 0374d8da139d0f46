"""The answer on its way to the client, ended by the client's own limits."""

from collections.abc import Awaitable, Callable, Sequence


class StopStrings:
    """Ends a streamed text at the first of several stop strings; holds back text that may begin one.

    Attributes:
        stopped: whether one was found; text fed afterwards is dropped.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        """Start a text.

        Args:
            stops: the strings; none of them empty.
            include: whether the string that was found is part of the output.
        """
        self._stops, self._include = tuple(stops), include
        self._held = ""
        self.stopped = False

    def feed(self, text: str) -> str:
        """Add text and return the part that is certainly output."""
        if self.stopped:
            return ""
        if not self._stops:
            return text
        self._held += text
        found = [(place, stop) for stop in self._stops if (place := self._held.find(stop)) >= 0]
        if found:
            # The string that is complete first ends the text, as it would token by token.
            place, stop = min(found, key=lambda pair: (pair[0] + len(pair[1]), pair[0]))
            self.stopped = True
            return self._held[: place + len(stop) if self._include else place]
        keep = max(self._overlap(stop) for stop in self._stops)
        given, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return given

    def finish(self) -> str:
        """End the text and return the part that was held back."""
        held, self._held = ("" if self.stopped else self._held), ""
        return held

    def _overlap(self, stop: str) -> int:
        """The number of characters at the end that begin ``stop``."""
        longest = min(len(stop) - 1, len(self._held))
        return next((size for size in range(longest, 0, -1) if self._held.endswith(stop[:size])), 0)


class OutputStream:
    """The answer's text, without its confidence.

    The client's stop strings are looked for here and not by the engine, which would find them in the confidence too.

    Attributes:
        tokens: of the answer.
        finish_reason: of the answer, once it has ended.
        cut: whether a limit of the client's ended it here, and not the engine.
    """

    def __init__(
        self,
        begin: Callable[[str], Awaitable[None]],
        send: Callable[[str], Awaitable[None]],
        *,
        stops: Sequence[str],
        max_tokens: int | None,
    ) -> None:
        """Start an answer.

        Args:
            begin: called once, with the first text, which may be empty.
            send: takes further text.
            stops: strings that end the answer.
            max_tokens: of the answer; None: the engine's own limit.
        """
        self._begin, self._send = begin, send
        self._stops, self._max_tokens = StopStrings(stops), max_tokens
        self._begun = self.cut = False
        self._waiting = ""
        self.tokens = 0
        self.finish_reason: str | None = None

    def is_full(self) -> bool:
        """Whether the answer has ended."""
        return self.finish_reason is not None

    def feed(self, text: str, tokens: int, finish_reason: str | None = None) -> None:
        """Add a chunk."""
        if self.is_full():
            return
        self.tokens += tokens
        self._waiting += self._stops.feed(text)
        if self._stops.stopped:
            self.finish_reason, self.cut = "stop", True
        elif finish_reason is not None:
            self.finish_reason = finish_reason
        elif self._max_tokens is not None and self.tokens >= self._max_tokens:
            self.finish_reason, self.cut = "length", True

    async def send(self) -> None:
        """Send the text that is certain; the first call begins the answer."""
        text, self._waiting = self._waiting, ""
        if not self._begun:
            self._begun = True
            await self._begin(text)
        elif text:
            await self._send(text)

    async def close(self) -> None:
        """Send the rest of the answer."""
        self._waiting += self._stops.finish()
        await self.send()
