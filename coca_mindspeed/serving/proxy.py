"""The OpenAI-compatible proxy: chat completions that are answered by the tiers of a configuration."""

import json
import os
import re
import time
import uuid
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from coca_mindspeed.algorithm.response import CONFIDENCE_FIRST_PROMPT
from coca_mindspeed.calibration.maps import read_map
from coca_mindspeed.errors import ConfigError
from coca_mindspeed.serving.asgi import (
    Reply,
    answer_or_error,
    check_key,
    internal_error,
    read_body,
    until_client_leaves,
)
from coca_mindspeed.serving.backend_error import BackendError
from coca_mindspeed.serving.backends import Backend, http_session
from coca_mindspeed.serving.drift import DriftAlarm
from coca_mindspeed.serving.journal import Journal, states_its_confidence
from coca_mindspeed.serving.openai_format import ApiError, Ask, Envelope, read_ask, usage
from coca_mindspeed.serving.prometheus import ServingMetrics
from coca_mindspeed.serving.router import Router
from coca_mindspeed.serving.serving_config import ServingConfig, TierConfig
from coca_mindspeed.serving.tier import Recalibrate, Tier
from coca_mindspeed.serving.trace import Trace

_DOMAIN = re.compile(r"[A-Za-z0-9._-]{1,64}")
_STATUS = {"busy": 429, "timeout": 504, "rejected": 400, "unreachable": 502, "failed": 502, "garbage": 502, "cut": 502}


class Proxy:
    """The proxy's state; :meth:`app` is the ASGI application."""

    def __init__(self, config: ServingConfig, environment: Mapping[str, str] | None = None) -> None:
        """Prepare everything that can be wrong before the first request.

        Args:
            config: checked.
            environment: where the keys are; the process's own by default.

        Raises:
            ConfigError: a key is not in the environment, or a calibration map does not match its tier.
        """
        environment = os.environ if environment is None else environment
        self.config = config
        self.metrics = ServingMetrics()
        self._key = _key(environment, config.listen.api_key_env, "listen.api_key_env")
        self._keys = {
            name: _key(environment, backend.api_key_env, f"backends.{name}.api_key_env")
            for name, backend in config.backends.items()
        }
        self._maps = [_recalibration(tier, config) for tier in config.tiers]
        self._journal: Journal | None = None
        if config.log is not None:
            self._journal = Journal(Path(config.log.directory), config.name, texts=config.log.texts)
        self._drift = DriftAlarm(config.drift.run_length, config.drift.error)
        self._running = 0
        self._router: Router

    def app(self) -> Starlette:
        """The application."""
        return Starlette(
            routes=[
                Route("/v1/chat/completions", _Endpoint(self), methods=["POST"]),
                Route("/v1/models", self._guarded(self._models), methods=["GET"]),
                Route("/v1/coca/labels", self._guarded(self._labels), methods=["POST"]),
                Route("/metrics", self._guarded(self._metrics), methods=["GET"]),
                Route("/health", self._health, methods=["GET"]),
            ],
            lifespan=self._lifespan,
            exception_handlers={404: _not_found, 405: _not_found, Exception: internal_error},
        )

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        async with http_session() as session:
            backends = {
                name: Backend(name, backend, self._keys[name], session)
                for name, backend in self.config.backends.items()
            }
            rules = [
                self.config.rule(i) if tier.states_confidence else None for i, tier in enumerate(self.config.tiers)
            ]
            tiers = [
                Tier(index, tier, backends[tier.backend], rules[index], self._maps[index])
                for index, tier in enumerate(self.config.tiers)
            ]
            self._router = Router(self.config, tiers, session)
            yield

    def _guarded(self, handle: Any) -> Any:
        async def guarded(request: Request) -> Response:
            try:
                check_key(request, self._key)
                return await handle(request)  # type: ignore[no-any-return]  # a handler of ours
            except ApiError as error:
                return JSONResponse(error.body(), error.status, error.headers())

        return guarded

    async def _health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok", "drift": list(self._drift.alarms())})

    async def _models(self, request: Request) -> Response:
        model = {"id": self.config.name, "object": "model", "created": 0, "owned_by": "coca-mindspeed"}
        return JSONResponse({"object": "list", "data": [model]})

    async def _metrics(self, request: Request) -> Response:
        return Response(self.metrics.page(), media_type="text/plain; version=0.0.4")

    async def _labels(self, request: Request) -> Response:
        """A late verdict: ``{"id": ..., "correct": true}``."""
        if self._journal is None:
            raise ApiError(400, "labels need the section log")
        try:
            values = json.loads(await read_body(request, 10_000, self.config.limits.body_s))
            id_, correct = values["id"], values["correct"]
        except (ValueError, KeyError, TypeError) as error:
            raise ApiError(400, 'expected {"id": "...", "correct": true or false}') from error
        if not isinstance(id_, str) or not isinstance(correct, bool):
            raise ApiError(400, 'expected {"id": "...", "correct": true or false}')
        row = self._journal.label(id_, correct)
        if row is None:
            raise ApiError(404, "no answered request of this id waits for a label", param="id")
        self.metrics.labels.labels(str(correct).lower()).inc()
        confidence = row["confidence"] if states_its_confidence(row) else None
        self._drift.label(confidence, correct, answered=row.get("basis") == "confidence")
        for name, watch in self._drift.watches.items():
            self.metrics.drift_evidence.labels(name).set(watch.evidence)
            self.metrics.drift_alarm.labels(name).set(watch.alarm)
        return JSONResponse({"drift": list(self._drift.alarms())})

    async def chat(self, request: Request, reply: Reply, receive: Receive) -> None:
        """Answer one chat completion."""
        limits = self.config.limits
        check_key(request, self._key)
        if self._running >= limits.concurrent:
            raise ApiError(429, f"{limits.concurrent} requests are being answered already", retry_after=1)
        self._running += 1
        self.metrics.running.set(self._running)
        try:
            body = await read_body(request, limits.request_bytes, limits.body_s)
            ask = read_ask(body, chat=True, served=self.config.name)
            if ask.log_probs is not None or ask.token_ids or ask.include_stop:
                name = "logprobs" if ask.log_probs is not None else "return_token_ids"
                raise ApiError(400, f"{name} would tell of the confidence's tokens", param=name)
            domain = request.headers.get("x-coca-domain")
            if domain is not None and not _DOMAIN.fullmatch(domain):
                raise ApiError(400, "x-coca-domain should be up to 64 letters, digits, '.', '_' or '-'")
            await self._answer(ask, domain, reply, receive)
        finally:
            self._running -= 1
            self.metrics.running.set(self._running)

    async def _answer(self, ask: Ask, domain: str | None, reply: Reply, receive: Receive) -> None:
        trace = Trace(f"chatcmpl-{uuid.uuid4().hex}", domain)
        sink = _ClientSink(ask, trace, reply, keep=self._journal is not None)
        outcome = "error"
        try:

            async def work() -> None:
                await self._router.answer(ask, trace, sink)
                await sink.end()

            stayed = await until_client_leaves(receive, work, self.config.limits.deadline_s)
            outcome = "ok" if stayed else "client_gone"
        except TimeoutError as error:
            outcome = "deadline"
            message = f"the request took longer than {self.config.limits.deadline_s:g} s"
            raise ApiError(504, message, code="timeout") from error
        except BackendError as error:
            outcome = error.kind
            raise ApiError(_STATUS[error.kind], str(error), code=error.kind, retry_after=error.retry_after) from error
        finally:
            ended = time.monotonic()
            self.metrics.observe(trace, outcome, ended)
            if self._journal is not None:
                question = str(ask.messages[-1]["content"]) if ask.messages else ""
                self._journal.write(trace, outcome, ended, question, sink.given)


class _Endpoint:
    """The chat endpoint as a plain ASGI application: it must hear of a client that leaves at any time."""

    def __init__(self, proxy: Proxy) -> None:
        self._proxy = proxy

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        reply = Reply(scope, send)
        await answer_or_error(reply, lambda: self._proxy.chat(Request(scope, receive), reply, receive))


class _ClientSink:
    """Writes an answer as the client wants it: in pieces or whole."""

    def __init__(self, ask: Ask, trace: Trace, reply: Reply, *, keep: bool) -> None:
        self._ask, self._trace, self._reply, self._keep = ask, trace, reply, keep
        self._envelope = Envelope.new(trace.id, ask.model)
        self._text_piece = self._envelope.text_pieces()
        self.given = ""

    async def begin(self, trace: Trace, text: str) -> None:
        self._note(text)
        if self._ask.stream:
            await self._reply.begin_stream(trace.headers())
            first = self._envelope.piece("", first=True, coca=trace.fields())
            await self._reply.send(first + self._text_piece(text) if text else first)

    async def text(self, text: str) -> None:
        self._note(text)
        if self._ask.stream:
            await self._reply.send(self._text_piece(text))

    def _note(self, text: str) -> None:
        if text and self._trace.first_text is None:
            self._trace.first_text = time.monotonic()
        if self._keep or not self._ask.stream:
            self.given += text

    def take_back(self) -> bool:
        if not self._reply.begun:
            self.given = ""
        return not self._reply.begun

    async def end(self) -> None:
        """The answer is whole."""
        trace = self._trace
        reason = trace.finish_reason or "stop"
        counted = usage(trace.prompt_tokens, trace.answer_tokens)
        if not self._ask.stream:
            whole = self._envelope.whole(self.given, reason, counted, None, coca=trace.fields())
            await self._reply.json(whole, trace.headers())
            return
        last = self._envelope.piece(finish_reason=reason, coca=trace.fields())
        await self._reply.end_stream(last + self._envelope.usage_piece(counted) if self._ask.usage else last)


def _key(environment: Mapping[str, str], name: str | None, where: str) -> str | None:
    if name is None:
        return None
    if not environment.get(name):
        raise ConfigError(f"{where}: the environment variable {name} is not set")
    return environment[name]


def _recalibration(tier: TierConfig, config: ServingConfig) -> Recalibrate:
    if tier.calibration is None:
        return lambda stated, domain: stated
    prompt = CONFIDENCE_FIRST_PROMPT if tier.system_prompt is None else tier.system_prompt
    assert tier.temperature is not None
    found = read_map(Path(tier.calibration))
    found.require(config.backends[tier.backend].model, prompt, tier.temperature, where=f"tiers: {tier.name}")
    return found.apply_one


async def _not_found(request: Request, error: Exception) -> Response:
    status = getattr(error, "status_code", 404)
    answer = ApiError(status, f"{request.method} {request.url.path} is not served here")
    return JSONResponse(answer.body(), status)
