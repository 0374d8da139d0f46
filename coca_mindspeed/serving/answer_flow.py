"""An answer on its way to the client: cut at the client's own limits, and held back where a second gate waits."""

from collections.abc import Awaitable, Callable, Sequence

from coca_mindspeed.serving.pieces import TokenLogProbs
from coca_mindspeed.serving.stop_texts import StopTexts


class AnswerFlow:
    """The answer's text, without its confidence.

    The client's stop texts are looked for here and not by the engine, which would find them in the confidence too.

    Attributes:
        tokens: of the answer.
        finish_reason: why it ended, once it has.
        given: the text so far, where it is kept or held.
    """

    def __init__(
        self,
        give: Callable[[str], Awaitable[None]] | None = None,
        begin: Callable[[], Awaitable[None]] | None = None,
        *,
        stops: Sequence[str],
        max_tokens: int | None,
        held: bool = False,
    ) -> None:
        """Begin.

        Args:
            give: takes text; None: it is kept.
            begin: called once before the first text.
            stops: texts that end the answer.
            max_tokens: that end it; None: the engine's own limit.
            held: whether to keep everything until :meth:`close`.
        """
        self._give, self._begin, self._held = give, begin, held
        self._stops, self._max_tokens = StopTexts(stops), max_tokens
        self._log_probs: list[float] = []
        self._opened = False
        self.tokens = 0
        self.finish_reason: str | None = None
        self.given = ""

    def is_full(self) -> bool:
        """Whether nothing more is wanted."""
        return self._stops.stopped or self.finish_reason is not None

    @property
    def mean_log_prob(self) -> float | None:
        """Of the answer's tokens, in nats."""
        return sum(self._log_probs) / len(self._log_probs) if self._log_probs else None

    async def open(self) -> None:
        """The answer is wanted."""
        if not self._opened and not self._held and self._begin is not None:
            await self._begin()
        self._opened = True

    async def feed(self, text: str, log_probs: Sequence[TokenLogProbs], tokens: int) -> None:
        """Take a piece."""
        if self.is_full():
            return
        self.tokens += tokens
        self._log_probs += [token.log_prob for token in log_probs]
        await self._out(self._stops.feed(text))
        if self._stops.stopped:
            self.finish_reason = "stop"
        elif self._max_tokens is not None and self.tokens >= self._max_tokens:
            self.finish_reason = "length"

    async def close(self) -> None:
        """The answer is whole: give what is left."""
        rest = self._stops.finish()
        if self._held and self._begin is not None and self._give is not None:
            await self._begin()
            await self._give(self.given + rest)
        else:
            await self._out(rest)

    async def _out(self, text: str) -> None:
        if not text:
            return
        if self._give is None or self._held:
            self.given += text
        else:
            await self._give(text)
