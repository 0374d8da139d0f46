"""Backends of the proxy: OpenAI-compatible servers, asked for streams only, which can be aborted at any time."""

import asyncio
import json
import logging
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from typing import Any, Literal, NamedTuple

import aiohttp
import anyio
from aiohttp.http_exceptions import HttpProcessingError
from pydantic_core import from_json
from yarl import URL

from coca_router.config import BY_CLIENT, BackendConfig
from coca_router.openai_api import to_json
from coca_router.tool_calls import ToolCalls

_LOG = logging.getLogger(__name__)
_MAX_EVENT = 1 << 20  # bytes
_MAX_MESSAGE = 500
_MAX_RETRY_AFTER_S = 3600.0
_KEEP_ALIVE_S = 4.0  # below the 5 s after which servers on uvicorn (vLLM) close an idle connection
_READY_S = 2.0  # longest wait for a backend whose readiness is asked for
_LAST_EVENT_S = 1.0  # longest wait for the usage and the end of the message after a whole answer


class BackendError(Exception):
    """A backend did not give a whole answer.

    Attributes:
        kind: ``unreachable``, ``timeout``, ``busy`` (429), ``rejected`` (an error in the request), ``failed`` (an error
            of the engine, or a wrong key), ``garbage`` (unknown protocol) or ``cut`` (it ended before the answer).
        retry_after: seconds, where the backend named them.
    """

    Kind = Literal["unreachable", "timeout", "busy", "rejected", "failed", "garbage", "cut"]

    def __init__(self, kind: Kind, message: str, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.kind, self.retry_after = kind, retry_after


def http_session() -> aiohttp.ClientSession:
    """The HTTP client of all backends; created in the event loop that uses it."""
    # limits.concurrent bounds the requests, and ChunkStream the waits.
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S),
        cookie_jar=aiohttp.DummyCookieJar(),
        timeout=aiohttp.ClientTimeout(),
        read_bufsize=_MAX_EVENT // 2,  # a line may be twice as long
    )


class Chunk(NamedTuple):
    """A chunk of an answer."""

    text: str
    tokens: int  # where the engine names no ids, 1 for a chunk with text
    usage: tuple[int, int] | None  # (prompt, completion) tokens so far, in the last chunk or in each
    finish_reason: str | None  # in the last chunk with text
    log_probs: Sequence[float] = ()  # of its tokens (nats), where the engine names them
    tool_calls: Sequence[Mapping[str, Any]] = ()  # parts of tool calls; of a ChunkStream: in OpenAI's form
    thought: str = ""  # text that a reasoning parser of the engine takes for a thought, before ``text``

    @property
    def progresses(self) -> bool:
        """Whether it holds more than a role or an empty text, which engines also send to keep a connection open."""
        return self.tokens > 0 or self.finish_reason is not None


def parse_chunk(data: bytes) -> Chunk | None:
    """Parse an event's JSON; None for an error of the engine.

    Raises KeyError, TypeError, ValueError, AttributeError or IndexError.
    """
    value = from_json(data)
    if value.get("error") or value.get("object") == "error":  # the latter: vLLM before 0.10.1
        return None
    usage = _usage(value.get("usage"))
    choices = value["choices"] if usage is None else value.get("choices")
    choice = choices[0] if choices else {}
    delta = choice.get("delta") or {}
    text = delta.get("content") or ""
    thought = delta.get("reasoning_content") or delta.get("reasoning") or ""
    calls = list(delta.get("tool_calls") or ())
    reason = choice.get("finish_reason")
    if not (isinstance(text, str) and isinstance(thought, str)) or not isinstance(reason, str | None):
        raise TypeError("text and finish reason should be text")
    ids = choice.get("token_ids")
    return Chunk(
        text=text,
        tokens=len(list(map(int, ids))) if ids is not None else int(bool(text or thought or calls)),
        usage=usage,
        # Engines also write "" or "null" before the end of the answer.
        finish_reason=None if reason in (None, "", "null") else reason,
        log_probs=_log_probs(choice.get("logprobs")),
        tool_calls=calls,
        thought=thought,
    )


def _log_probs(value: Any) -> Sequence[float]:
    """Of OpenAI's field; empty where it is absent or has another form."""
    try:
        return [float(token["logprob"]) for token in value["content"]]
    except (TypeError, KeyError, ValueError):
        return ()


def _usage(value: Mapping[str, Any] | None) -> tuple[int, int] | None:
    """(prompt, completion) tokens; None where they are not whole numbers, since no answer is worth less for that."""
    if not isinstance(value, dict) or not value:
        return None
    counts = value.get("prompt_tokens") or 0, value.get("completion_tokens") or 0
    if not all(type(count) in (int, float) and count >= 0 and count % 1 == 0 for count in counts):
        return None
    return int(counts[0]), int(counts[1])


class ChunkStream:
    """Iterates over the chunks of an answer; BackendError ``cut`` if it is incomplete.

    ``finished``: whether a chunk named a finish reason, so that the answer is whole.
    """

    def __init__(self, backend: "Backend", response: aiohttp.ClientResponse, scope: anyio.CancelScope) -> None:
        self._name, self._config, self._response, self._scope = backend.name, backend.config, response, scope
        self._read: deque[Chunk] = deque()
        self._calls = ToolCalls()
        self._ended = False
        self._last = math.inf  # time until which events after the answer are awaited
        self.finished = False

    async def prefetch(self) -> None:
        """Read until the first chunk with a token; its deadline is already set."""
        while not self._ended and not any(chunk.progresses for chunk in self._read):
            await self._read_event()
        self._scope.deadline = math.inf

    def __aiter__(self) -> "ChunkStream":
        return self

    async def __anext__(self) -> Chunk:
        while not self._read and not self._ended:
            if self._scope.deadline == math.inf and not self.finished:
                self._scope.deadline = anyio.current_time() + self._config.between_tokens_s
            await self._read_event()
        if not self._read:
            self._scope.deadline = math.inf
            raise StopAsyncIteration
        chunk = self._read.popleft()
        if chunk.progresses:  # comments and empty chunks do not prolong the wait
            self._scope.deadline = math.inf
        return chunk

    async def _read_event(self) -> None:
        """Read one event, or the end of the answer."""
        data = b""
        while line := await self._line():
            line = line.strip()
            if line.startswith(b"data:") and len(data) <= _MAX_EVENT:
                data += line[5:]
            elif not line and data:
                break
            if data.strip() == b"[DONE]":
                break
        if data and data.strip() != b"[DONE]":
            self._add(data)
        else:
            self._ended = True
        if self._ended and not self.finished:
            raise BackendError("cut", f"backend {self._name} ended in the middle of an answer")

    def _add(self, data: bytes) -> None:
        try:
            chunk = self._parse(data)
        except BackendError:
            if not self.finished:
                raise
            _LOG.info("backend %s: ignored an unknown event after the answer", self._name)
            return
        if chunk.finish_reason is not None and not self.finished:
            self.finished, self._last = True, anyio.current_time() + _LAST_EVENT_S
        self._ended = self.finished and chunk.usage is not None
        self._read.append(chunk)

    def _parse(self, data: bytes) -> Chunk:
        try:
            chunk = parse_chunk(data)
            calls = [self._calls.add(call) for call in chunk.tool_calls] if chunk is not None else []
        except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
            message = f"backend {self._name} sent an event that is no chunk of an answer"
            raise BackendError("garbage", message) from error
        if chunk is None or chunk.finish_reason in ("abort", "aborted", "error", "cancelled"):
            raise BackendError("failed", f"backend {self._name} failed in the middle of an answer")
        if chunk.finish_reason is not None:
            calls += self._calls.missing_ids()
        return chunk._replace(tool_calls=calls)

    async def _line(self) -> bytes:
        """The next line; empty at the end of the message."""
        try:
            with anyio.CancelScope(deadline=self._last):
                return await self._response.content.readline()
            return b""
        except (ValueError, HttpProcessingError) as error:  # by the release of aiohttp
            problem = BackendError("garbage", f"backend {self._name} sent an event of too many bytes")
            cause: Exception = error
        except (aiohttp.ClientError, OSError, RuntimeError) as error:  # RuntimeError: the connection is being closed
            problem, cause = BackendError("cut", f"backend {self._name} broke the connection"), error
        if not self.finished:
            raise problem from cause
        return b""

    def leave(self) -> None:
        """Return the connection to the pool, or close it, which aborts the generation."""
        if self.finished:
            # It returns once the end of the message has arrived.
            asyncio.get_running_loop().call_later(_LAST_EVENT_S, self._response.close)
        else:
            self._response.close()


class Backend:
    """An OpenAI-compatible server; ``session`` is set in the event loop that uses it."""

    session: aiohttp.ClientSession

    def __init__(self, name: str, config: BackendConfig, key: str | None) -> None:
        self.name, self.config = name, config
        base = URL(config.url)
        path = base.raw_path.rstrip("/")
        self._url, self._models = (
            base.with_path(f"{path}/{name}", encoded=True).with_query(base.query)
            for name in ("chat/completions", "models")
        )
        self.address = str(base.with_query(None).with_user(None))  # for logs, which hold no key
        self._headers = {
            "accept": "text/event-stream",
            "accept-encoding": "identity",
            "content-type": "application/json",
            **({} if key is None else {"authorization": f"Bearer {key}"}),
        }
        self._not_before = -math.inf
        self._has_chats = False  # found at its address
        self._named_thoughts = False

    @asynccontextmanager
    async def stream(
        self, messages: Sequence[Mapping[str, Any]], max_tokens: int | None, sampling: Mapping[str, Any]
    ) -> AsyncIterator[ChunkStream]:
        """Stream an answer; leaving the block early aborts the generation. Raises BackendError, also on iteration."""
        pause = self._not_before - time.monotonic()
        if pause > 0:
            raise BackendError("busy", f"backend {self.name} asked for a pause", pause)
        fixed = {name: value for name, value in self.config.request.items() if value != BY_CLIENT}
        asked: dict[str, Any] = {"model": self.config.model, "stream": True, **fixed, **sampling}
        counting = {"include_usage": True}
        if self.config.dialect == "vllm":  # an answer that is aborted has its counts too
            counting["continuous_usage_stats"] = True
        asked |= {"stream_options": counting, "messages": list(messages)}
        if max_tokens is not None:
            asked[self.config.token_limit] = max_tokens
        if self.config.dialect == "vllm":
            asked["return_token_ids"] = True
        body = to_json(asked)
        with anyio.CancelScope() as scope:
            try:
                stream = await self._open(body, scope)
            except BackendError as error:
                # A kept connection may have been closed meanwhile: ask once more before the first token.
                if error.kind not in ("unreachable", "cut"):
                    raise
                stream = await self._open(body, scope)
            try:
                yield stream
            finally:
                stream.leave()
        if scope.cancelled_caught:
            raise BackendError("timeout", f"backend {self.name} sent no token in time")

    def note_thought(self, named: bool) -> None:
        """Say once that a model without thinking has its answers named as thoughts."""
        if named and not self._named_thoughts:
            fix = "they are read as answers; serve the model without --reasoning-parser, or set thinking of its tier"
            _LOG.warning("backend %s names answers as reasoning: %s", self.name, fix)
            self._named_thoughts = True

    async def problem(self) -> str | None:
        """Why the server cannot be asked, None if it can; whoever reads it may not know the address.

        Its models are asked for, whatever it says of them.  Some servers list none; at a wrong address there are no
        chats either, which an empty request shows without generating anything.
        """
        request: dict[str, Any] = {"headers": self._headers, "allow_redirects": False}
        try:
            with anyio.fail_after(_READY_S):
                async with self.session.get(self._models, **request) as models:
                    if models.status != 404 or self._has_chats:
                        return None
                async with self.session.post(self._url, data=b"{}", **request) as chats:
                    self._has_chats = chats.status != 404
        except (aiohttp.ClientError, OSError) as error:  # TimeoutError is an OSError
            return type(error).__name__
        return None if self._has_chats else f"HTTP 404; check backends.{self.name}.url, up to and including /v1"

    async def _open(self, body: bytes, scope: anyio.CancelScope) -> ChunkStream:
        """A stream whose first token has arrived. Raises BackendError."""
        scope.deadline = anyio.current_time() + self.config.first_token_s
        try:
            response = await self.session.post(self._url, data=body, headers=self._headers, allow_redirects=False)
        except (aiohttp.ClientError, OSError) as error:
            message = (
                f"backend {self.name} at {self.address}: {type(error).__name__}; is it running, and its url right?"
            )
            raise BackendError("unreachable", message) from error
        try:
            kind = response.headers.get("content-type", "")
            if response.status != 200:
                raise await self._refusal(response)
            if not kind.startswith("text/event-stream"):
                raise BackendError("garbage", f"backend {self.name}: expected an event stream, found {kind[:60]!r}")
            stream = ChunkStream(self, response, scope)
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
            text = error_message(json.loads(await response.content.read(1 << 16)))[:_MAX_MESSAGE]
        except (aiohttp.ClientError, OSError, ValueError, RecursionError):
            text = ""
        if status in (400, 413, 422):
            return BackendError("rejected", f"backend {self.name} rejected the request: {text or status}")
        hints = {401: "; check api_key_env", 403: "; check api_key_env", 404: f": {text}; check url and model"}
        return BackendError("failed", f"backend {self.name} answered with status {status}{hints.get(status, '')}")


def error_message(body: Any) -> str:
    """The message of an engine's error: OpenAI's form, that of vLLM before 0.10.1, or FastAPI's ``detail``."""
    if not isinstance(body, dict):
        return ""
    error = body.get("error") or body.get("message") or body.get("detail") or ""
    if isinstance(error, dict):
        error = error.get("message", "")
    if isinstance(error, list):  # FastAPI's validation: where and what
        problems = [each for each in error if isinstance(each, dict)]
        return "; ".join(f"{'.'.join(map(str, p.get('loc') or ()))}: {p.get('msg', '')}" for p in problems)
    return str(error)


def _retry_after(value: str | None) -> float | None:
    """Seconds from now of a header with seconds or a date; None for anything else."""
    try:
        seconds = float(value or "nan")
    except ValueError:
        try:
            date = parsedate_to_datetime(value or "")
        except (ValueError, OverflowError):
            return None
        seconds = (date.replace(tzinfo=date.tzinfo or timezone.utc) - datetime.now(timezone.utc)).total_seconds()
    return min(max(seconds, 0.0), _MAX_RETRY_AFTER_S) if math.isfinite(seconds) else None
