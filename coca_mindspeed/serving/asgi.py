"""What both servers need of HTTP: keys, bodies of a bounded size, clients that leave, and errors in OpenAI's form."""

import asyncio
import hmac
import math
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import anyio
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from coca_mindspeed.serving.openai_format import DONE, ApiError, event


async def read_body(request: Request, limit: int, seconds: float) -> bytes:
    """The request's body.

    Raises:
        ApiError: 413 as soon as it is known to be larger than ``limit`` bytes; 408 if it takes more than ``seconds``.
    """
    too_large = ApiError(413, f"the request is larger than {limit} bytes", code="request_too_large")
    stated = request.headers.get("content-length", "")
    if stated.isdecimal() and int(stated) > limit:
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


def check_key(request: Request, key: str | None) -> None:
    """Let the request pass if it shows the key; compared in constant time.

    Raises:
        ApiError: 401.
    """
    shown = request.headers.get("authorization", "").removeprefix("Bearer ")
    if key is not None and not hmac.compare_digest(shown.encode(), key.encode()):
        raise ApiError(401, "the API key is missing or wrong", code="invalid_api_key")


async def until_client_leaves(receive: Receive, work: Callable[[], Awaitable[None]], seconds: float = math.inf) -> bool:
    """Run ``work`` to its end, or stop it when the client leaves.

    Returns:
        Whether the client stayed.

    Raises:
        TimeoutError: it took more than ``seconds``.
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
        try:
            await work()
        finally:
            watching.cancel()
    if scope.cancelled_caught and not left:
        raise TimeoutError
    return not scope.cancelled_caught


class Reply:
    """One HTTP answer that is begun late: until then it can still become an error.

    Attributes:
        begun: whether the status has been sent.
        ended: whether the last byte has been sent.
    """

    def __init__(self, scope: Scope, send: Send) -> None:
        self._scope, self._send = scope, send
        self.begun = self.ended = False

    async def begin_stream(self, headers: Mapping[str, str]) -> None:
        """Send status 200 of an event stream."""
        self.begun = True
        pairs = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache", **headers}
        raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in pairs.items()]
        await self._send({"type": "http.response.start", "status": 200, "headers": raw})

    async def send(self, data: bytes) -> None:
        """Send one event."""
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end_stream(self, data: bytes = b"") -> None:
        """Send the last events, and say that the answer was whole."""
        self.ended = True
        await self._send({"type": "http.response.body", "body": data + DONE, "more_body": False})

    async def json(self, value: Mapping[str, Any], headers: Mapping[str, str], status: int = 200) -> None:
        """Send a whole answer."""
        self.begun = self.ended = True
        await JSONResponse(value, status, dict(headers))(self._scope, _no_more, self._send)

    async def error(self, error: ApiError) -> None:
        """Send an error; in the middle of a stream it is an event, and the stream ends without saying ``[DONE]``."""
        if self.ended:
            return
        if self.begun:
            self.ended = True
            await self.send(event(error.body()))
            await self._send({"type": "http.response.body", "body": b"", "more_body": False})
        else:
            await self.json(error.body(), error.headers(), error.status)


async def answer_or_error(reply: Reply, work: Callable[[], Awaitable[None]]) -> None:
    """Run ``work``, whose errors become answers; what nobody foresaw is raised again, for the server's log."""
    try:
        await work()
    except ApiError as error:
        await reply.error(error)
    except Exception:
        await reply.error(_internal_error())
        raise


async def internal_error(request: Request, error: Exception) -> Response:
    """For an application's ``exception_handlers``."""
    answer = _internal_error()
    return JSONResponse(answer.body(), answer.status)


def _internal_error() -> ApiError:
    return ApiError(500, "the server made a mistake; its log says more", code="internal_error")


async def _no_more() -> Any:
    return {"type": "http.disconnect"}
