"""An engine's stream of server-sent events while it arrives, as pieces of an answer.

What came at once is read at once and given on as one block: an event loop that has fallen behind then catches up by
writing less often.
"""

import asyncio
import math
from collections.abc import Iterator, Sequence

import aiohttp
import anyio
from pydantic_core import from_json

from coca_mindspeed.serving.backend_error import BackendError
from coca_mindspeed.serving.pieces import Piece, piece_of
from coca_mindspeed.serving.serving_config import BackendConfig

_MAX_LINE = 1 << 20
# An answer that has ended is followed by the end of its connection's message; a connection on which that does not
# arrive is given up.
_LAST_WORD_S = 1.0


class Patience:
    """Ends a scope when a wait inside it takes too long; between waits it may last.

    A wait only writes down until when it may last.  The one timer looks at that when it rings, so that a wait costs
    nothing of the event loop.

    Attributes:
        seconds: of the last wait, or the present one.
    """

    def __init__(self, scope: anyio.CancelScope) -> None:
        self._scope = scope
        self._loop = asyncio.get_running_loop()
        self._until = math.inf
        self._timer: asyncio.TimerHandle | None = None
        self.seconds = math.inf

    def of(self, seconds: float) -> "Patience":
        """For the next ``with`` block."""
        self.seconds = seconds
        return self

    def __enter__(self) -> None:
        self._until = self._loop.time() + self.seconds
        if self._timer is None or self._timer.when() > self._until:
            self._ring_at(self._until)

    def __exit__(self, *exception: object) -> None:
        self._until = math.inf

    def end(self) -> None:
        """Nothing is waited for any more."""
        if self._timer is not None:
            self._timer.cancel()

    def _ring_at(self, when: float) -> None:
        self.end()
        self._timer = self._loop.call_at(when, self._ring)

    def _ring(self) -> None:
        self._timer = None
        if self._until <= self._loop.time():
            self._scope.cancel()
        elif self._until < math.inf:
            self._ring_at(self._until)


class PieceReader:
    """Pieces from the bytes of an event stream.

    Attributes:
        finished: whether a piece has said why the answer ended: it is whole.
        ended: whether nothing more of it follows.
    """

    def __init__(self, name: str) -> None:
        """Begin; ``name`` is the backend's, for errors."""
        self._name = name
        self._held = b""
        self.finished = self.ended = False

    def feed(self, received: bytes) -> Iterator[Piece]:
        """The pieces that are whole by now.

        Raises:
            BackendError: what came is none, or an error of the engine's.
        """
        *lines, self._held = (self._held + received).split(b"\n")
        if len(self._held) > _MAX_LINE:
            raise BackendError("garbage", f"backend {self._name} sent a line of more than {_MAX_LINE} bytes")
        for line in lines:
            if self.ended or not line.startswith(b"data:"):
                continue
            data = line[5:].strip()
            if data == b"[DONE]":
                self.ended = True
                continue
            # An engine that counts the tokens does it in an event of its own behind the last piece.
            self.ended = self.finished
            piece = self._piece(data)
            self.finished = self.finished or piece.finish_reason is not None
            yield piece

    def _piece(self, data: bytes) -> Piece:
        try:
            value = from_json(data)
            if "error" in value:
                raise BackendError("failed", f"backend {self._name} failed in the middle of an answer")
            return piece_of(value)
        except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
            raise BackendError("garbage", f"backend {self._name} sent what is no piece of an answer") from error


class AnswerStream:
    """Iterates over the blocks of an answer: the pieces that came at once, up to the end.

    Raises on iteration:
        BackendError: ``cut`` where the end is not that of the answer.
    """

    def __init__(self, name: str, config: BackendConfig, response: aiohttp.ClientResponse, patience: Patience) -> None:
        """Begin with a response that is an event stream."""
        self._name, self._response, self._patience = name, response, patience
        self._wait, self._next_waits = config.first_token_s, config.between_tokens_s
        self._reader = PieceReader(name)
        self._problem: BackendError | None = None

    @property
    def finished(self) -> bool:
        """Whether the engine has ended the answer by itself."""
        return self._reader.finished

    def __aiter__(self) -> "AnswerStream":
        return self

    async def __anext__(self) -> Sequence[Piece]:
        block: list[Piece] = []
        while not block:
            if self._problem is not None:
                raise self._problem
            if self._reader.ended or not (received := await self._receive()):
                if self._reader.finished:
                    raise StopAsyncIteration
                raise BackendError("cut", f"backend {self._name} ended in the middle of an answer")
            try:
                block.extend(self._reader.feed(received))
            except BackendError as error:  # raised behind the pieces that came before it
                self._problem = error
        return block

    def leave(self) -> None:
        """Give the connection back, or close it, which ends a generation that has not ended by itself."""
        if self._reader.finished and self._problem is None:
            # It goes back by itself once the message's end has arrived, which may be a moment later.
            asyncio.get_running_loop().call_later(_LAST_WORD_S, self._response.close)
        else:
            self._response.close()

    async def _receive(self) -> bytes:
        try:
            with self._patience.of(self._wait):
                received = await self._response.content.readany()
        except (aiohttp.ClientError, OSError, RuntimeError) as error:  # the last is a connection that is being closed
            raise BackendError("cut", f"backend {self._name} broke the connection") from error
        self._wait = self._next_waits
        return received
