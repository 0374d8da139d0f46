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
        given: the text that is kept: until it is sent, or for good.
    """

    def __init__(
        self,
        begin: Callable[[str], Awaitable[None]] | None = None,
        give: Callable[[str], Awaitable[None]] | None = None,
        *,
        stops: Sequence[str],
        max_tokens: int | None,
        held: bool = False,
    ) -> None:
        """Begin.

        Args:
            begin: called once, with the text that is there by then; None: everything is kept.
            give: takes further text.
            stops: texts that end the answer.
            max_tokens: that end it; None: the engine's own limit.
            held: whether to keep everything until :meth:`close`.
        """
        self._begin, self._give, self._held = begin, give, held
        self._stops, self._max_tokens = StopTexts(stops), max_tokens
        self._log_probs: list[float] = []
        self._begun = False
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

    def feed(self, text: str, log_probs: Sequence[TokenLogProbs], tokens: int) -> None:
        """Take a piece."""
        if self.is_full():
            return
        self.tokens += tokens
        if log_probs:
            self._log_probs += [token.log_prob for token in log_probs]
        self.given += self._stops.feed(text)
        if self._stops.stopped:
            self.finish_reason = "stop"
        elif self._max_tokens is not None and self.tokens >= self._max_tokens:
            self.finish_reason = "length"

    async def send(self) -> None:
        """Give what has come so far, unless it is held back; the first time, the answer begins by it."""
        if not self._held:
            await self._send()

    async def close(self) -> None:
        """The answer is whole: give what is left."""
        self.given += self._stops.finish()
        await self._send()

    async def _send(self) -> None:
        if self._begin is None or self._give is None:
            return
        text, self.given = self.given, ""
        if not self._begun:
            self._begun = True
            await self._begin(text)
        elif text:
            await self._give(text)
