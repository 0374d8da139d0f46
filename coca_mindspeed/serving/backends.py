"""Engines behind the proxy: any OpenAI-compatible server, asked for streams alone.

A stream can be left at any time, which ends the generation, and it tells a whole answer from half of one: without a
finish reason it raises.  Whatever goes wrong is a :class:`BackendError` of one kind.
"""

import json
import math
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Literal

import anyio
import httpx

from coca_mindspeed.serving.pieces import Piece, piece_of
from coca_mindspeed.serving.serving_config import BackendConfig

ErrorKind = Literal["unreachable", "timeout", "busy", "rejected", "failed", "garbage", "cut"]

_MAX_LINE = 1 << 20
_MAX_MESSAGE = 500
_MAX_RETRY_AFTER_S = 3600.0


class BackendError(Exception):
    """A backend did not give a whole answer.

    Attributes:
        kind: ``unreachable``, ``timeout``, ``busy`` (429), ``rejected`` (it finds fault with the request), ``failed``
            (it finds fault with itself, or with our key), ``garbage`` (no protocol we know) or ``cut`` (it ended in
            the middle).
        retry_after: seconds, where it said so.
    """

    def __init__(self, kind: ErrorKind, message: str, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.kind, self.retry_after = kind, retry_after


@dataclass(frozen=True, slots=True)
class Generate:
    """What a backend is asked for: an answer to ``messages``, or one that goes on from ``prompt_ids``."""

    messages: Sequence[Mapping[str, Any]] | None = None
    prompt_ids: Sequence[int] | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    stops: Sequence[str] = ()
    include_stop: bool = False
    log_probs: int | None = None
    token_ids: bool = False
    others: Mapping[str, Any] | None = None


class _Patience:
    """Ends a scope when a wait inside it takes too long; between waits it may last.

    Attributes:
        seconds: of the last wait, or the present one.
    """

    def __init__(self, scope: anyio.CancelScope) -> None:
        self._scope = scope
        self.seconds = math.inf

    def of(self, seconds: float) -> "_Patience":
        """For the next ``with`` block."""
        self.seconds = seconds
        return self

    def __enter__(self) -> None:
        self._scope.deadline = anyio.current_time() + self.seconds

    def __exit__(self, *exception: object) -> None:
        self._scope.deadline = math.inf


class Backend:
    """One server."""

    def __init__(self, name: str, config: BackendConfig, key: str | None, client: httpx.AsyncClient) -> None:
        self.name, self.config = name, config
        self._key, self._client = key, client
        self._not_before = -math.inf

    @asynccontextmanager
    async def stream(self, ask: Generate) -> AsyncIterator[AsyncIterator[Piece]]:
        """Ask, and iterate over the pieces; leaving the block closes the connection, which ends the generation.

        Raises:
            BackendError: also from the iteration.
        """
        waiting = self._not_before - time.monotonic()
        if waiting > 0:
            raise BackendError("busy", f"backend {self.name} asked for a pause", waiting)
        chat = ask.prompt_ids is None
        url = f"{self.config.url.rstrip('/')}/{'chat/completions' if chat else 'completions'}"
        headers = {"accept": "text/event-stream", "accept-encoding": "identity"}
        if self._key is not None:
            headers["authorization"] = f"Bearer {self._key}"
        # How long a wait may last changes along the stream: one scope with a moving deadline watches over all of them,
        # which costs a fraction of a scope for each piece.
        timeout = httpx.Timeout(self.config.first_token_s, read=None, write=None)
        request = self._client.build_request("POST", url, json=self._body(ask), headers=headers, timeout=timeout)
        with anyio.CancelScope() as scope:
            patience = _Patience(scope)
            try:
                with patience.of(self.config.first_token_s):
                    response = await self._client.send(request, stream=True)
            except httpx.TimeoutException as error:
                raise self._timeout(self.config.first_token_s) from error
            except httpx.HTTPError as error:
                raise BackendError("unreachable", f"backend {self.name}: {type(error).__name__}") from error
            try:
                if response.status_code != 200:
                    raise await self._refusal(response)
                yield self._pieces(response, patience)
            finally:
                # Also where the request was cancelled: an engine must not go on for nobody.
                with anyio.CancelScope(shield=True):
                    await response.aclose()
        if scope.cancelled_caught:
            raise self._timeout(patience.seconds)

    def _body(self, ask: Generate) -> dict[str, Any]:
        body: dict[str, Any] = {"model": self.config.model, "stream": True, **(ask.others or {})}
        body |= {"messages": list(ask.messages)} if ask.messages is not None else {"prompt": list(ask.prompt_ids or ())}
        body["stream_options"] = {"include_usage": True}
        for name, value in (("max_tokens", ask.max_tokens), ("temperature", ask.temperature)):
            if value is not None:
                body[name] = value
        if ask.stops:
            body["stop"] = list(ask.stops)
        if ask.log_probs is not None:
            chat = {"logprobs": True, "top_logprobs": ask.log_probs}
            body |= chat if ask.messages is not None else {"logprobs": ask.log_probs}
        if self.config.dialect == "vllm":
            body["return_token_ids"] = True
            if ask.include_stop:
                body["include_stop_str_in_output"] = True
        return body

    async def _refusal(self, response: httpx.Response) -> BackendError:
        """What a status other than 200 means."""
        status = response.status_code
        if status == 429:
            pause = _retry_after(response.headers.get("retry-after"))
            self._not_before = time.monotonic() + (pause or 0.0)
            return BackendError("busy", f"backend {self.name} is busy", pause)
        try:
            with anyio.fail_after(self.config.between_tokens_s):
                text = _error_message(await _head_of(response))
        except (httpx.HTTPError, TimeoutError):
            text = ""
        if status in (400, 413, 422):
            return BackendError("rejected", f"backend {self.name} rejected the request: {text or status}")
        return BackendError("failed", f"backend {self.name} answered with status {status}")

    async def _pieces(self, response: httpx.Response, patience: "_Patience") -> AsyncIterator[Piece]:
        """The pieces up to the end; ``cut`` where that is not the end of the answer."""
        kind = response.headers.get("content-type", "")
        if not kind.startswith("text/event-stream"):
            raise BackendError("garbage", f"backend {self.name}: expected an event stream, found {kind[:60]!r}")
        finished = False
        async for data in self._events(response, patience):
            if data == "[DONE]":
                break
            piece = self._piece(data)
            finished = finished or piece.finish_reason is not None
            yield piece
        if not finished:
            raise BackendError("cut", f"backend {self.name} ended in the middle of an answer")

    async def _events(self, response: httpx.Response, patience: "_Patience") -> AsyncIterator[str]:
        """The data of each server-sent event."""
        held = b""
        wait = self.config.first_token_s
        source = response.aiter_raw()
        while True:
            try:
                with patience.of(wait):
                    received = await anext(source, None)
            except httpx.HTTPError as error:
                raise BackendError("cut", f"backend {self.name} broke the connection") from error
            if received is None:
                return
            wait = self.config.between_tokens_s
            *lines, held = (held + received).split(b"\n")
            if len(held) > _MAX_LINE:
                raise BackendError("garbage", f"backend {self.name} sent a line of more than {_MAX_LINE} bytes")
            for line in lines:
                line = line.rstrip(b"\r")
                if line.startswith(b"data:"):
                    try:
                        yield line[5:].strip().decode("utf-8")
                    except UnicodeDecodeError as error:
                        raise BackendError("garbage", f"backend {self.name} sent no UTF-8") from error

    def _piece(self, data: str) -> Piece:
        try:
            value = json.loads(data)
            if "error" in value:
                raise BackendError("failed", f"backend {self.name} failed in the middle of an answer")
            return piece_of(value)
        except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
            raise BackendError("garbage", f"backend {self.name} sent what is no piece of an answer") from error

    def _timeout(self, seconds: float) -> BackendError:
        return BackendError("timeout", f"backend {self.name} sent nothing for {seconds:g} s")


def _retry_after(value: str | None) -> float | None:
    """Seconds; a date or nonsense counts as not said."""
    try:
        seconds = float(value or "nan")
    except ValueError:
        return None
    return min(max(seconds, 0.0), _MAX_RETRY_AFTER_S) if math.isfinite(seconds) else None


async def _head_of(response: httpx.Response, size: int = 1 << 16) -> bytes:
    body = b""
    async for part in response.aiter_raw():
        body += part
        if len(body) >= size:
            break
    return body


def _error_message(body: bytes) -> str:
    try:
        error = json.loads(body).get("error", {})
        return str(error["message"] if isinstance(error, dict) else error)[:_MAX_MESSAGE]
    except (ValueError, KeyError, AttributeError, RecursionError):
        return ""
