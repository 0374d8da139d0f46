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
from typing import Any

import aiohttp
import anyio
from yarl import URL

from coca_mindspeed.serving.answer_stream import AnswerStream, Patience
from coca_mindspeed.serving.backend_error import BackendError
from coca_mindspeed.serving.openai_format import to_json
from coca_mindspeed.serving.serving_config import BackendConfig

_MAX_MESSAGE = 500
_MAX_RETRY_AFTER_S = 3600.0
# Below the five seconds after which vLLM and other servers on uvicorn close an idle connection, so that no request is
# put on one that is being closed.
_KEPT_OPEN_S = 4.0


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


def http_session() -> aiohttp.ClientSession:
    """The client of all backends and the hook; made in the event loop that uses it."""
    # Our own limit says how many requests there are at once; a pool's would make them wait in silence.  The waits are
    # watched here.
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEPT_OPEN_S),
        cookie_jar=aiohttp.DummyCookieJar(),
        timeout=aiohttp.ClientTimeout(),
    )


class Backend:
    """One server."""

    def __init__(self, name: str, config: BackendConfig, key: str | None, session: aiohttp.ClientSession) -> None:
        self.name, self.config = name, config
        self._session = session
        base = config.url.rstrip("/")
        self._chat, self._completions = URL(f"{base}/chat/completions"), URL(f"{base}/completions")
        self._models, self._context = URL(f"{base}/models"), config.context_tokens
        self._headers = {
            "accept": "text/event-stream",
            "accept-encoding": "identity",
            "content-type": "application/json",
        }
        if key is not None:
            self._headers["authorization"] = f"Bearer {key}"
        self._not_before = -math.inf

    @asynccontextmanager
    async def stream(self, ask: Generate) -> AsyncIterator[AnswerStream]:
        """Ask, and iterate over the blocks of pieces; leaving before the end closes the connection, which ends the
        generation.

        Raises:
            BackendError: also from the iteration.
        """
        waiting = self._not_before - time.monotonic()
        if waiting > 0:
            raise BackendError("busy", f"backend {self.name} asked for a pause", waiting)
        url = self._chat if ask.prompt_ids is None else self._completions
        body = to_json(self._body(ask))
        # How long a wait may last changes along the stream: one scope with a moving deadline watches over all of them,
        # which costs a fraction of a scope for each block.
        with anyio.CancelScope() as scope:
            patience = Patience(scope)
            try:
                response = await self._answered(url, body, patience)
                stream = AnswerStream(self.name, self.config, response, patience)
                try:
                    yield stream
                finally:
                    stream.leave()
            finally:
                patience.end()
        if scope.cancelled_caught:
            raise BackendError("timeout", f"backend {self.name} sent nothing for {patience.seconds:g} s")

    async def context_tokens(self) -> int:
        """The longest sequence, prompt included; the server is asked once.

        Raises:
            BackendError: it does not say, or cannot be asked.
        """
        if self._context is None:
            try:
                with anyio.fail_after(self.config.first_token_s):
                    async with self._session.get(
                        self._models, headers=self._headers, allow_redirects=False
                    ) as response:
                        listed = json.loads(await _head_of(response)) if response.status == 200 else {}
            except (aiohttp.ClientError, OSError, TimeoutError) as error:
                raise BackendError("unreachable", f"backend {self.name}: {type(error).__name__}") from error
            except (ValueError, RecursionError):
                listed = {}
            self._context = _longest_sequence(listed, self.config.model)
        if self._context is None:
            raise BackendError(
                "rejected",
                f"backend {self.name} does not say how long a sequence may be; give max_tokens, or set "
                f"backends.{self.name}.context_tokens",
            )
        return self._context

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

    async def _answered(self, url: URL, body: bytes, patience: Patience) -> aiohttp.ClientResponse:
        """The response to a request that was accepted.

        Raises:
            BackendError: it was not.
        """
        post = self._session.post(url, data=body, headers=self._headers, allow_redirects=False)
        try:
            with patience.of(self.config.first_token_s):
                response = await post
        except (aiohttp.ClientError, OSError) as error:
            raise BackendError("unreachable", f"backend {self.name}: {type(error).__name__}") from error
        kind = response.headers.get("content-type", "")
        if response.status == 200 and kind.startswith("text/event-stream"):
            return response
        try:
            if response.status == 200:
                raise BackendError("garbage", f"backend {self.name}: expected an event stream, found {kind[:60]!r}")
            raise await self._refusal(response)
        finally:
            response.close()

    async def _refusal(self, response: aiohttp.ClientResponse) -> BackendError:
        """What a status other than 200 means."""
        status = response.status
        if status == 429:
            pause = _retry_after(response.headers.get("retry-after"))
            self._not_before = time.monotonic() + (pause or 0.0)
            return BackendError("busy", f"backend {self.name} is busy", pause)
        try:
            with anyio.fail_after(self.config.between_tokens_s):
                text = _error_message(await _head_of(response))
        except (aiohttp.ClientError, OSError, TimeoutError):
            text = ""
        if status in (400, 413, 422):
            return BackendError("rejected", f"backend {self.name} rejected the request: {text or status}")
        return BackendError("failed", f"backend {self.name} answered with status {status}")


def _longest_sequence(listed: Any, model: str) -> int | None:
    """``max_model_len`` of a model in an answer of ``/v1/models``; None: it is not there."""
    models = listed.get("data") if isinstance(listed, dict) else None
    for entry in models if isinstance(models, list) else []:
        if isinstance(entry, dict) and entry.get("id") == model and type(entry.get("max_model_len")) is int:
            return int(entry["max_model_len"])
    return None


def _retry_after(value: str | None) -> float | None:
    """Seconds; a date or nonsense counts as not said."""
    try:
        seconds = float(value or "nan")
    except ValueError:
        return None
    return min(max(seconds, 0.0), _MAX_RETRY_AFTER_S) if math.isfinite(seconds) else None


async def _head_of(response: aiohttp.ClientResponse, size: int = 1 << 16) -> bytes:
    body = b""
    while len(body) < size and (part := await response.content.readany()):
        body += part
    return body


def _error_message(body: bytes) -> str:
    try:
        error = json.loads(body).get("error", {})
        return str(error["message"] if isinstance(error, dict) else error)[:_MAX_MESSAGE]
    except (ValueError, KeyError, AttributeError, RecursionError):
        return ""
