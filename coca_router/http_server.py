"""HTTP of both servers: limits, access, request bodies, clients that leave, shutdown, answers and errors."""

import asyncio
import base64
import hashlib
import hmac
import ipaddress
import math
import re
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import uvicorn
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from coca_mindspeed.errors import ConfigError, did_you_mean
from coca_router.openai_api import ApiError, ChatRequest, event, read_threshold
from coca_router.tool_calls import ToolCalls

_HEADER_BYTES = 1 << 16


def limited_protocol(header_s: float) -> type[HttpToolsProtocol]:
    """Uvicorn's protocol, which also closes a connection whose headers are late or larger than 64 KiB."""

    class Limited(HttpToolsProtocol):
        _timer: asyncio.TimerHandle | None = None  # set while headers are awaited
        _received = 0

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's
            super().connection_made(transport)
            self._await_headers()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_timer()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._received += len(data)
            if self._timer is not None and self._received > _HEADER_BYTES:
                self.transport.close()

        def on_message_begin(self) -> None:
            super().on_message_begin()
            self._await_headers()

        def on_headers_complete(self) -> None:
            self._stop_timer()
            super().on_headers_complete()

        def _await_headers(self) -> None:
            if self._timer is None:
                self._received, self._timer = 0, self.loop.call_later(header_s, self.transport.close)

        def _stop_timer(self) -> None:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

    return Limited


class Shutdown:
    """The scopes of running requests, which are cancelled if the server stops before they end."""

    def __init__(self) -> None:
        self.scopes: set[anyio.CancelScope] = set()
        self.over = False

    def cut(self) -> None:
        self.over = True
        for scope in list(self.scopes):
            scope.cancel()


class Server(uvicorn.Server):
    """Uvicorn with our limits; running requests may take ``drain_s`` seconds when it is told to stop."""

    def __init__(
        self, app: Any, shutdown: Shutdown, *, host: str = "127.0.0.1", port: int = 0, connections: int = 1024,
        drain_s: float = 30.0, header_s: float = 10.0, announcement: str = "",
    ) -> None:  # fmt: skip
        super().__init__(
            uvicorn.Config(
                app,
                host=host,
                port=port,
                http=limited_protocol(header_s),
                limit_concurrency=connections + 1,  # answers 503 to the connection that reaches it
                ws="none",
                log_level="warning",
                access_log=False,
                proxy_headers=False,
                backlog=2048,
                timeout_graceful_shutdown=math.ceil(drain_s) + 5,
            )
        )
        self._shutdown, self._drain_s, self._announcement = shutdown, drain_s, announcement

    async def startup(self, sockets: Any = None) -> None:
        try:
            await super().startup(sockets)
        except SystemExit as error:  # uvicorn has logged why
            if self.lifespan.should_exit:
                raise
            where = f"{self.config.host}:{self.config.port}"
            raise ConfigError(
                f"{where}: the address cannot be listened on; choose another port by --port (of a CONFIG: listen.port)"
            ) from error
        if self.started and self._announcement:  # the port is ours
            print(self._announcement, flush=True)

    async def shutdown(self, sockets: Any = None) -> None:
        asyncio.get_running_loop().call_later(self._drain_s, self._shutdown.cut)
        await super().shutdown(sockets)


@dataclass(frozen=True)
class Access:
    """Checks who may ask.

    Without a ``key``, ``Host`` (besides IP addresses and ``localhost``) and ``Origin`` are checked instead, so that no
    web page can use a server on the user's own machine. ``admin_key`` is for labels; None: as ``key``.
    """

    key: str | None = None
    admin_key: str | None = None
    hosts: Sequence[str] = ()
    origins: Sequence[str] = ()
    own_page: bool = False  # whether :func:`page` is served, whose scripts may ask

    def check(self, request: Request, *, admin: bool = False) -> None:
        """Raise ApiError 401 or 403, or 415 for a body that is not declared as JSON."""
        key = self.key if not admin or self.admin_key is None else self.admin_key
        shown = re.sub("(?i)^bearer +", "", request.headers.get("authorization", ""))
        if key is not None and not hmac.compare_digest(shown.encode(), key.encode()):
            raise ApiError(401, "the API key is missing or wrong", code="invalid_api_key")
        host, origin = request.headers.get("host", ""), request.headers.get("origin")
        if key is None and not (_is_address(host) or {host, host.rpartition(":")[0]} & set(self.hosts)):
            message = f"host {host!r} is not served without a key; see listen.hosts, --allow-host"
            raise ApiError(403, message, code="forbidden_host")
        is_own = self.own_page and origin is not None and origin.partition("://")[2] == host
        if key is None and origin is not None and origin not in self.origins and not is_own:
            raise ApiError(403, f"origin {origin!r} may not ask; see listen.origins", code="forbidden_origin")
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if request.method == "POST" and kind != "application/json":
            raise ApiError(415, f"content-type: expected application/json, found {kind!r}", param="content-type")


_PAGE = Path(__file__).with_name("page.html").read_bytes()


def _policy(html: bytes) -> str:
    """Only the page's own script runs, and it reaches nothing but this server."""
    script = html.partition(b"<script>")[2].partition(b"</script>")[0]
    digest = base64.b64encode(hashlib.sha256(script).digest()).decode()
    return (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


_PAGE_HEADERS = {"content-security-policy": _policy(_PAGE), "x-content-type-options": "nosniff"}


async def page(request: Request) -> Response:
    """A page that asks this server; it holds nothing that needs a key."""
    return HTMLResponse(_PAGE, headers=_PAGE_HEADERS)


def for_browsers(app: ASGIApp, origins: Sequence[str]) -> ASGIApp:
    """``app`` for scripts of web pages: preflights are answered, and every answer, also of status 500, may be read."""
    shown = ("x-request-id", "x-coca-confidence", "x-coca-action", "x-coca-tier", "x-coca-tokens", "retry-after")
    return CORSMiddleware(
        app, allow_origins=origins, allow_methods=["GET", "POST"], allow_headers=["*"], expose_headers=shown
    )


def _is_address(host: str) -> bool:
    """Whether a ``Host`` header is an IP address or ``localhost``, so that no DNS name is rebound to this server."""
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdecimal() else host
    try:
        return name == "localhost" or bool(ipaddress.ip_address(name.strip("[]")))
    except ValueError:
        return False


def models_response(request: Request, served: str, *, thresholds: bool = False, **fields: Any) -> Response:
    """The list of models, or the one in the path; ApiError 404 for another one."""
    name = request.path_params.get("name", served)
    read_threshold(name, served, allowed=thresholds)
    entry = {"id": name, "object": "model", "created": 0, "owned_by": "coca-mindspeed", **fields}
    return JSONResponse(entry if "name" in request.path_params else {"object": "list", "data": [entry]})


async def read_body(request: Request, limit: int, seconds: float) -> bytes:
    """The request's body; ApiError 413 as soon as it exceeds ``limit`` bytes, 408 after ``seconds``."""
    too_large = ApiError(413, f"the request is larger than {limit} bytes", code="request_too_large")
    stated = request.headers.get("content-length", "")
    if stated.isdecimal() and int(stated[:20]) > limit:
        raise too_large
    body = bytearray()
    try:
        with anyio.fail_after(seconds):
            async for part in request.stream():
                body += part
                if len(body) > limit:
                    raise too_large
    except TimeoutError as error:
        message = f"the request's body did not come within {seconds:g} s"
        raise ApiError(408, message, code="request_timeout") from error
    return bytes(body)


async def until_client_leaves(
    receive: Receive, work: Callable[[], Awaitable[None]], shutdown: Shutdown, seconds: float = math.inf
) -> bool:
    """Run ``work``, or stop it when the client leaves; return whether the client stayed.

    ApiError 504 after ``seconds``, 503 if the server stops.
    """
    left = False
    with anyio.CancelScope(deadline=asyncio.get_running_loop().time() + seconds) as scope:

        async def watch() -> None:
            nonlocal left
            while (await receive())["type"] != "http.disconnect":
                pass
            left = True
            scope.cancel()

        watching = asyncio.create_task(watch())
        shutdown.scopes.add(scope)
        try:
            await work()
        finally:
            watching.cancel()
            shutdown.scopes.discard(scope)
    if scope.cancelled_caught and not left:
        if shutdown.over:
            raise ApiError(503, "the server is stopping", code="shutting_down", retry_after=1)
        raise ApiError(504, f"the request took longer than {seconds:g} s", code="timeout")
    return not scope.cancelled_caught


class Reply:
    """One HTTP answer that begins late: until ``begun`` it can still become an error."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._scope, self.receive, self._send = scope, receive, send
        self.begun = False

    async def begin_stream(self, headers: Mapping[str, str]) -> None:
        self.begun = True
        pairs = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache", **headers}
        raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in pairs.items()]
        await self._send({"type": "http.response.start", "status": 200, "headers": raw})

    async def send(self, data: bytes, *, more: bool = True) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": more})

    async def json(self, value: Mapping[str, Any], headers: Mapping[str, str]) -> None:
        self.begun = True
        await JSONResponse(value, 200, dict(headers))(self._scope, self.receive, self._send)


class StreamingEndpoint:
    """A handler as a plain ASGI application, so that it sees a client leave.

    An error in the middle of a stream becomes an event, and no ``[DONE]`` follows.
    """

    def __init__(self, answer: Callable[[Request, Reply], Awaitable[None]]) -> None:
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        reply = Reply(scope, receive, send)
        try:
            await self._answer(Request(scope, receive), reply)
        except Exception as error:
            if not reply.begun:
                raise  # to error_handlers
            known = error if isinstance(error, ApiError) else _INTERNAL
            await reply.send(event(known.body()), more=False)
            if known is _INTERNAL:
                raise


_INTERNAL = ApiError(500, "internal error; the server's log has it", code="internal_error")


def error_handlers() -> Mapping[Any, Any]:
    """An application's ``exception_handlers``."""

    async def answer(request: Request, error: Exception) -> Response:
        if isinstance(error, HTTPException):
            paths = [route.path for route in request.app.routes if isinstance(route, Route)]
            near = did_you_mean(request.url.path, paths) or f"; served are {', '.join(paths)}"
            shown = ApiError(error.status_code, f"{request.method} {request.url.path} is not served here{near}")
        else:
            shown = error if isinstance(error, ApiError) else _INTERNAL
        return JSONResponse(shown.body(), shown.status, shown.headers())

    return dict.fromkeys((ApiError, HTTPException, Exception), answer)


class AnswerWriter:
    """Writes an answer; until its first text it can still become an error.

    ``text`` is the text of a whole answer; with ``keep`` also that of a stream.
    """

    def __init__(
        self,
        request: ChatRequest,
        id_: str,
        reply: Reply,
        headers: Callable[[], Mapping[str, str]],
        fields: Callable[[], Mapping[str, Any]] = dict,
        *,
        keep: bool = False,
    ) -> None:
        """``headers`` and ``fields`` (of the answer, its first and its last chunk) are read when they are sent."""
        self._reply, self._headers, self._fields = reply, headers, fields
        self._stream = bool(request.stream)
        self._keep, options = keep or not self._stream, request.stream_options
        self._counts = self._stream and options is not None and bool(options.include_usage)
        self._continuous = self._counts and options is not None and bool(options.continuous_usage_stats)
        self.counted: tuple[int, int] | None = None  # (prompt, completion) tokens so far, for usage in every chunk
        kind = f"chat.completion{'.chunk' if self._stream else ''}"
        self._head = {"id": id_, "object": kind, "created": int(time.time()), "model": request.model}
        self._ids: list[int] = []
        self._calls = ToolCalls()
        self.text = self.thought = ""

    async def write_thought(self, thought: str) -> None:
        """Send a part of the thought, which goes to the client in a field of its own."""
        if not thought:
            return
        if not self._stream:
            self.thought += thought
            return
        await self.write("")
        await self._reply.send(event(self._object({"delta": {"reasoning": thought}})))

    async def write(self, text: str, token_ids: Sequence[int] = ()) -> None:
        """Send text; the first call begins the answer, also with an empty text."""
        if self._keep:
            self.text += text
        if not self._stream:
            self._ids += token_ids
            return
        data = b""
        if not self._reply.begun:
            data = event({**self._object({"delta": {"role": "assistant", "content": ""}}), **self._fields()})
            await self._reply.begin_stream(self._headers())
        if text or token_ids:
            data += event(self._object({"delta": {"content": text}}, token_ids=token_ids))
        if data:
            await self._reply.send(data)

    async def write_calls(self, calls: Sequence[Mapping[str, Any]]) -> None:
        """Send parts of tool calls in OpenAI's form, which are joined where the answer is no stream."""
        if self._stream:
            await self.write("")
            await self._reply.send(event(self._object({"delta": {"tool_calls": calls}})))
        for call in calls:
            self._calls.add(call)

    def discard(self) -> bool:
        """Drop the text so far; False if some of it was sent."""
        if not self._reply.begun:
            self.text = self.thought = ""
        return not self._reply.begun

    async def end(self, finish_reason: str, prompt_tokens: int | None, tokens: int) -> None:
        """End the answer; without ``prompt_tokens`` its usage is null, since a client would add up a wrong total."""
        usage = None if prompt_tokens is None else _usage(prompt_tokens, tokens)
        if not self._stream:
            whole_calls = self._calls.whole()
            message = {"role": "assistant", "content": self.text or (None if whole_calls else ""), "refusal": None}
            message |= {"reasoning": self.thought} if self.thought else {}
            calls = {"tool_calls": whole_calls} if whole_calls else {}
            whole = self._object({"message": message | calls}, finish_reason, self._ids)
            await self._reply.json({**whole, "usage": usage, **self._fields()}, self._headers())
            return
        data = event({**self._object({"delta": {}}, finish_reason), **self._fields()})
        if self._counts:
            data += event({**self._head, "choices": [], "usage": usage})
        await self._reply.send(data + b"data: [DONE]\n\n", more=False)

    def _object(
        self, content: Mapping[str, Any], finish_reason: str | None = None, token_ids: Sequence[int] = ()
    ) -> dict[str, Any]:
        choice = {"index": 0, **content, "logprobs": None, "finish_reason": finish_reason}
        ids = {"token_ids": list(token_ids)} if token_ids else {}
        usage = _usage(*self.counted) if self._continuous and self.counted else None
        return {**self._head, "choices": [choice | ids], **({"usage": usage} if self._counts else {})}


def _usage(prompt_tokens: int, tokens: int) -> dict[str, int]:
    return {"prompt_tokens": prompt_tokens, "completion_tokens": tokens, "total_tokens": prompt_tokens + tokens}
