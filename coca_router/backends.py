"""Backends of the proxy: OpenAI-compatible servers, asked for streams only, which can be aborted at any time."""

import asyncio
import json
import math
import time
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from typing import Any, TypeVar

import aiohttp
import anyio
from yarl import URL

from coca_router.chunks import BackendError, Chunk, ChunkReader
from coca_router.config import BackendConfig
from coca_router.openai_api import to_json

T = TypeVar("T")

_MAX_MESSAGE = 500
_MAX_RETRY_AFTER_S = 3600.0
_KEEP_ALIVE_S = 4.0  # below the 5 s after which servers on uvicorn (vLLM) close an idle connection
_LAST_EVENT_S = 1.0  # longest wait for the usage and the end of the message behind a whole answer


@dataclass(frozen=True, slots=True)
class Generate:
    """A request to a backend: an answer to ``messages``, or the continuation of ``prompt_ids``."""

    messages: Sequence[Mapping[str, Any]] = ()
    prompt_ids: Sequence[int] | None = None
    max_tokens: int | None = None
    stops: Sequence[str] = ()
    include_stop: bool = False
    log_probs: bool = False
    sampling: Mapping[str, Any] = field(default_factory=dict)


def http_session() -> aiohttp.ClientSession:
    """The HTTP client of all backends; created in the event loop that uses it."""
    # limits.concurrent bounds the requests, and Timeout the waits.
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S),
        cookie_jar=aiohttp.DummyCookieJar(),
        timeout=aiohttp.ClientTimeout(),
    )


class Timeout:
    """Cancels a scope when one of many waits exceeds its ``seconds``; one timer serves all of them.

    Setting the scope's own deadline twice for each chunk would cost a tenth of the proxy's processor time.
    """

    def __init__(self, scope: anyio.CancelScope) -> None:
        self._scope, self._loop = scope, asyncio.get_running_loop()
        self._until = self.seconds = math.inf
        self._timer: asyncio.TimerHandle | None = None

    def start(self, seconds: float) -> None:
        self.seconds, self._until = seconds, self._loop.time() + seconds
        if self._timer is None or self._timer.when() > self._until:
            self._set(self._until)

    def stop(self) -> None:
        """End the wait; the timer stays set."""
        self._until = math.inf

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _set(self, when: float) -> None:
        self.close()
        self._timer = self._loop.call_at(when, self._ring)

    def _ring(self) -> None:
        self._timer = None
        if self._until <= self._loop.time():
            self._scope.cancel()
        elif self._until < math.inf:
            self._set(self._until)


class ChunkStream:
    """Iterates over blocks of chunks that arrived at once; BackendError ``cut`` if the answer is incomplete."""

    def __init__(self, backend: "Backend", response: aiohttp.ClientResponse, timeout: Timeout) -> None:
        self._name, self._config, self._response, self._timeout = backend.name, backend.config, response, timeout
        self._reader = ChunkReader(backend.name)
        self._first: list[Chunk] | None = None
        self._problem: BackendError | None = None

    @property
    def finished(self) -> bool:
        return self._reader.finished

    async def prefetch(self) -> None:
        """Read the first block; its wait is already running."""
        self._first = await self._block()

    def __aiter__(self) -> "ChunkStream":
        return self

    async def __anext__(self) -> Sequence[Chunk]:
        block, self._first = self._first, None
        if not block:
            self._timeout.start(self._config.between_tokens_s)
            block = await self._block()
        if not block:
            raise StopAsyncIteration
        return block

    async def _block(self) -> list[Chunk]:
        """The next chunks, none where the answer has ended.

        The wait ends with the first chunk that progresses: comments and empty chunks do not prolong it.
        """
        block: list[Chunk] = []
        while not any(chunk.progresses for chunk in block):
            if self._problem is not None:
                raise self._problem
            if self._reader.ended:
                break
            received = await self._receive()
            try:
                block.extend(self._reader.feed(received) if received else self._reader.close())
            except BackendError as error:  # raised after the chunks before it
                self._problem = error
                continue
            if not received:
                self._reader.ended = True
        self._timeout.stop()
        if not block and not self._reader.finished:
            raise BackendError("cut", f"backend {self._name} ended in the middle of an answer")
        return block

    async def _receive(self) -> bytes:
        try:
            if not self._reader.finished:
                return await self._response.content.readany()
            with anyio.move_on_after(_LAST_EVENT_S):
                return await self._response.content.readany()
            return b""
        except (aiohttp.ClientError, OSError, RuntimeError) as error:  # RuntimeError: the connection is being closed
            if self._reader.finished:
                return b""
            raise BackendError("cut", f"backend {self._name} broke the connection") from error

    def leave(self) -> None:
        """Return the connection to the pool, or close it, which aborts the generation."""
        if self._reader.finished and self._problem is None:
            # It returns once the end of the message has arrived.
            asyncio.get_running_loop().call_later(_LAST_EVENT_S, self._response.close)
        else:
            self._response.close()


class Backend:
    """An OpenAI-compatible server; ``session`` is set in the event loop that uses it."""

    session: aiohttp.ClientSession

    def __init__(self, name: str, config: BackendConfig, key: str | None) -> None:
        self.name, self.config = name, config
        base = config.url.rstrip("/")
        self._chat, self._completions = URL(f"{base}/chat/completions"), URL(f"{base}/completions")
        self._headers = {
            "accept": "text/event-stream",
            "accept-encoding": "identity",
            "content-type": "application/json",
            **({} if key is None else {"authorization": f"Bearer {key}"}),
        }
        self._not_before = -math.inf

    @asynccontextmanager
    async def stream(self, generate: Generate) -> AsyncIterator[ChunkStream]:
        """Stream an answer; leaving the block early aborts the generation. Raises BackendError, also on iteration."""
        pause = self._not_before - time.monotonic()
        if pause > 0:
            raise BackendError("busy", f"backend {self.name} asked for a pause", pause)
        url, body = self._chat if generate.prompt_ids is None else self._completions, to_json(self._body(generate))
        with anyio.CancelScope() as scope:
            timeout = Timeout(scope)
            try:
                try:
                    stream = await self._opened(url, body, timeout)
                except BackendError as error:
                    # A kept connection may have been closed meanwhile: ask once more before the first token.
                    if error.kind not in ("unreachable", "cut"):
                        raise
                    stream = await self._opened(url, body, timeout)
                try:
                    yield stream
                finally:
                    stream.leave()
            finally:
                timeout.close()
        if scope.cancelled_caught:
            raise BackendError("timeout", f"backend {self.name} sent no token for {timeout.seconds:g} s")

    def _body(self, generate: Generate) -> dict[str, Any]:
        body: dict[str, Any] = {"model": self.config.model, "stream": True, **generate.sampling}
        body["stream_options"] = {"include_usage": True}
        if generate.prompt_ids is None:
            body["messages"] = list(generate.messages)
        else:
            body["prompt"] = list(generate.prompt_ids)
        if generate.max_tokens is not None or generate.prompt_ids is not None:
            body["max_tokens"] = generate.max_tokens  # null: to the end of the context; absent: 16 of a completion
        if generate.stops:
            body["stop"] = list(generate.stops)
        if generate.log_probs:
            body |= {"logprobs": True, "top_logprobs": 0}
        if self.config.dialect == "vllm":
            body["return_token_ids"] = True
            if generate.include_stop:
                body["include_stop_str_in_output"] = True
        return body

    async def _opened(self, url: URL, body: bytes, timeout: Timeout) -> ChunkStream:
        """A stream whose first block has arrived. Raises BackendError."""
        timeout.start(self.config.first_token_s)
        try:
            response = await self.session.post(url, data=body, headers=self._headers, allow_redirects=False)
        except (aiohttp.ClientError, OSError) as error:
            raise BackendError("unreachable", f"backend {self.name}: {type(error).__name__}") from error
        try:
            kind = response.headers.get("content-type", "")
            if response.status != 200:
                raise await self._refusal(response)
            if not kind.startswith("text/event-stream"):
                raise BackendError("garbage", f"backend {self.name}: expected an event stream, found {kind[:60]!r}")
            stream = ChunkStream(self, response, timeout)
            await stream.prefetch()
        except BaseException:
            response.close()
            raise
        return stream

    async def _refusal(self, response: aiohttp.ClientResponse) -> BackendError:
        status = response.status
        if status == 429:
            pause = _retry_after(response.headers.get("retry-after"))
            self._not_before = time.monotonic() + (pause or 0.0)
            return BackendError("busy", f"backend {self.name} is busy", pause)
        try:
            with anyio.fail_after(self.config.between_tokens_s):
                body = b""
                while len(body) < 1 << 16 and (part := await response.content.readany()):
                    body += part
                text = _error_message(body)
        except (aiohttp.ClientError, OSError, TimeoutError):
            text = ""
        if status in (400, 413, 422):
            return BackendError("rejected", f"backend {self.name} rejected the request: {text or status}")
        hint = {401: "; check api_key_env", 403: "; check api_key_env", 404: f": {text}; check url and model"}.get(
            status, ""
        )
        return BackendError("failed", f"backend {self.name} answered with status {status}{hint}")


async def gather(*calls: Awaitable[T]) -> list[T]:
    """Await all calls at once; returns the results of those that succeed, or raises the first BackendError."""
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    failed = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
    unexpected = [error for error in failed if not isinstance(error, BackendError)]
    if unexpected or len(failed) == len(outcomes):
        raise (unexpected or failed)[0]
    return [outcome for outcome in outcomes if not isinstance(outcome, BaseException)]


def _retry_after(value: str | None) -> float | None:
    """Seconds from a number or an HTTP date; None for anything else."""
    try:
        seconds = float(value or "nan")
    except ValueError:
        try:
            seconds = parsedate_to_datetime(value or "").timestamp() - time.time()
        except (ValueError, OverflowError):
            return None
    return min(max(seconds, 0.0), _MAX_RETRY_AFTER_S) if math.isfinite(seconds) else None


def _error_message(body: bytes) -> str:
    try:
        error = json.loads(body).get("error", {})
        return str(error["message"] if isinstance(error, dict) else error)[:_MAX_MESSAGE]
    except (ValueError, KeyError, AttributeError, RecursionError):
        return ""
