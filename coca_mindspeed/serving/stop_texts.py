"""Ending a text at the first of several texts, while it arrives in pieces."""

from collections.abc import Sequence


class StopTexts:
    """Holds back what may be the beginning of a stop text, and cuts at the first that is whole.

    Attributes:
        stopped: whether one was found; whatever is fed afterwards is dropped.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        """Begin.

        Args:
            stops: the texts; none of them empty.
            include: whether the text that was found is part of what is given.
        """
        self._stops, self._include = tuple(stops), include
        self._held = ""
        self.stopped = False

    def feed(self, text: str) -> str:
        """Read a piece; returns what can no longer be part of a stop text."""
        if self.stopped or not self._stops:
            return "" if self.stopped else text
        self._held += text
        found = [(place, stop) for stop in self._stops if (place := self._held.find(stop)) >= 0]
        if found:
            # The one that is complete first ends the text, as it would token by token.
            place, stop = min(found, key=lambda pair: (pair[0] + len(pair[1]), pair[0]))
            self.stopped = True
            return self._held[: place + len(stop) if self._include else place]
        keep = max((self._overlap(stop) for stop in self._stops), default=0)
        given, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return given

    def finish(self) -> str:
        """The text has ended; returns what was held back."""
        held, self._held = ("" if self.stopped else self._held), ""
        return held

    def _overlap(self, stop: str) -> int:
        """How many characters at the end are a beginning of ``stop``."""
        longest = min(len(stop) - 1, len(self._held))
        return next((size for size in range(longest, 0, -1) if self._held.endswith(stop[:size])), 0)
