"""The OpenAI-compatible proxy: chat completions, answered by the tiers of a configuration."""

import asyncio
import math
import os
import re
import time
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from pydantic import BaseModel, ConfigDict
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from coca_mindspeed.errors import ConfigError
from coca_router import http_server as server
from coca_router.backends import Backend, BackendError, http_session
from coca_router.config import ServingConfig, TierPolicy, tier_policies
from coca_router.http_server import AnswerWriter
from coca_router.openai_api import ApiError, ChatRequest, read_json_body, read_request, read_threshold
from coca_router.prompts import CATEGORY_HEADER, check_category
from coca_router.request_log import LogError, RequestLog
from coca_router.router import Router, Tier
from coca_router.trace import Trace

_DOMAIN = re.compile(r"[A-Za-z0-9._-]{1,64}")
_STATUS = {"busy": 429, "timeout": 504, "rejected": 400, "unreachable": 502, "failed": 502, "garbage": 502, "cut": 502}


class LabelRequest(BaseModel):
    """The body of ``/v1/coca/labels``."""

    model_config = ConfigDict(strict=True, extra="forbid")

    id: str
    correct: bool


class Proxy:
    """The proxy of a configuration; :meth:`app` is the ASGI application."""

    def __init__(self, config: ServingConfig, environment: Mapping[str, str] | None = None) -> None:
        """Prepare; ``environment`` holds the keys (default: the process's).

        ConfigError if a key is not in the environment, a calibration or certificate does not match its tier, or the
        log cannot be opened.
        """
        environment = os.environ if environment is None else environment
        listen = config.listen
        self.config, self.shutdown = config, server.Shutdown()

        def key_of(section: str, variable: str | None) -> str | None:
            if variable is not None and not environment.get(variable):
                raise ConfigError(f"{section}: the environment variable {variable} is not set")
            return variable and environment[variable]

        keys = key_of("listen.api_key_env", listen.api_key_env), key_of("listen.admin_key_env", listen.admin_key_env)
        self._access = server.Access(*keys, [listen.host, *listen.hosts], listen.origins, own_page=listen.page)
        self._backends = {
            name: Backend(name, backend, key_of(f"backends.{name}.api_key_env", backend.api_key_env))
            for name, backend in config.backends.items()
        }
        tiers = zip(config.tiers, tier_policies(config), strict=True)
        self._tiers = [Tier(tier, self._backends[tier.backend], policy) for tier, policy in tiers]
        passing = next((tier for tier in self._tiers if tier.config.passthrough), None)
        self._passing = passing and Tier(passing.config.passing(), passing.backend, TierPolicy(None))
        self._log: RequestLog | None = None
        if config.log is not None:
            directory = Path(config.log.directory)
            self._log = RequestLog(directory, config.name, texts=config.log.texts, max_days=config.log.max_days)
        self.running = 0
        self._asking, self._asked_at = asyncio.Lock(), -math.inf
        self._problems: dict[str, str | None] = {}  # of each backend, at the last look

    def app(self) -> ASGIApp:
        app = Starlette(
            routes=[
                Route("/v1/chat/completions", server.StreamingEndpoint(self._chat), methods=["POST"]),
                Route("/v1/models", self._models, methods=["GET"]),
                Route("/v1/models/{name}", self._models, methods=["GET"]),
                Route("/v1/coca/labels", self._labels, methods=["POST"]),
                Route("/health", self._health, methods=["GET"]),
                Route("/ready", self._ready, methods=["GET"]),
                *([Route("/", server.page, methods=["GET"])] if self.config.listen.page else []),
            ],
            lifespan=self._lifespan,
            exception_handlers=server.error_handlers(),
        )
        return server.for_browsers(app, self.config.listen.origins)

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        async with http_session() as session:
            for backend in self._backends.values():
                backend.session = session
            yield
        if self._log is not None:
            self._log.close()

    async def _health(self, request: Request) -> Response:
        problem, waiting = (None, 0) if self._log is None else (self._log.problem, len(self._log.waiting))
        status = "ok" if problem is None else "degraded"
        return JSONResponse({"status": status, "log": {"error": problem, "waiting": waiting}})

    async def _ready(self, request: Request) -> Response:
        """Whether a request can be answered: 503 while a backend that is needed for it cannot be reached."""
        async with self._asking:  # one look at a time, and at most one a second
            if time.monotonic() - self._asked_at >= 1.0:
                problems = await asyncio.gather(*(backend.problem() for backend in self._backends.values()))
                self._problems, self._asked_at = dict(zip(self._backends, problems, strict=True)), time.monotonic()
        reached = 1 if self.config.on_error == "fail" else self.config.caps.escalations + 1
        needed = [tier.backend.name for tier in self._tiers[:reached]]
        ready = any(self._problems[name] is None for name in needed)
        backends = {name: problem or "ok" for name, problem in self._problems.items()}
        body = {"status": "ready" if ready else "unready", "backends": backends}
        return JSONResponse(body, 200 if ready else 503)

    async def _models(self, request: Request) -> Response:
        self._access.check(request)
        return server.models_response(request, self.config.name, thresholds=True)

    async def _labels(self, request: Request) -> Response:
        self._access.check(request, admin=True)
        if self._log is None:
            raise ApiError(400, "labels need the section log")
        label = read_json_body(await server.read_body(request, 10_000, self.config.limits.body_s), LabelRequest)
        try:
            stored = self._log.label(label.id, label.correct)
        except LogError as error:
            raise ApiError(503, f"the label could not be stored: {error}", code="log_error", retry_after=5) from error
        if not stored:
            raise ApiError(404, "no answer of this id waits for a label", param="id")
        return JSONResponse({"id": label.id, "correct": label.correct})

    async def _chat(self, request: Request, reply: server.Reply) -> None:
        limits = self.config.limits
        self._access.check(request)
        if self.running >= limits.concurrent:
            raise ApiError(429, f"{limits.concurrent} requests are being answered already", retry_after=1)
        self.running += 1
        try:
            body = await server.read_body(request, limits.request_bytes, limits.body_s)
            chat = read_request(body, self.config.name, thresholds=True, tools=self._passing is not None)
            if chat.return_token_ids:
                message = "return_token_ids: the confidence is removed from the answer"
                raise ApiError(400, message, param="return_token_ids")
            if chat.stream_options is not None and chat.stream_options.continuous_usage_stats:
                name = "stream_options.continuous_usage_stats"
                raise ApiError(
                    400, f"{name}: use include_usage; the tokens of several tiers are known at the end", name
                )
            domain = request.headers.get("x-coca-domain")
            if domain is not None and not _DOMAIN.fullmatch(domain):
                raise ApiError(400, "x-coca-domain: expected up to 64 letters, digits, '.', '_' or '-'")
            threshold = read_threshold(chat.model, self.config.name)
            tiers = self._tiers if self._passing is None or chat.passed() is None else [self._passing]
            category = request.headers.get(CATEGORY_HEADER)
            if tiers is self._tiers:
                check_category([tier.prompt for tier in tiers], category)
            if chat.reasoning_effort is not None and not any(tier.passes_effort for tier in tiers):
                message = "reasoning_effort: no tier here passes it on (backends.NAME.request.reasoning_effort: client)"
                raise ApiError(400, message, param="reasoning_effort", code="unsupported_parameter")
            for tier in tiers:
                tier.check(chat, threshold)
            trace = Trace(f"chatcmpl-{uuid.uuid4().hex}", domain)
            await self._answer(chat, tiers, threshold, category, trace, reply)
        finally:
            self.running -= 1

    async def _answer(
        self, chat: ChatRequest, tiers: Sequence[Tier], threshold: float | None, category: str | None, trace: Trace,
        reply: server.Reply,
    ) -> None:  # fmt: skip
        question = chat.messages[-1].as_dict()["content"] or ""
        keep = self.config.log is not None and self.config.log.texts
        writer = AnswerWriter(chat, trace.id, reply, trace.headers, lambda: {"coca": trace.fields()}, keep=keep)
        outcome, logged = "error", False

        def note(outcome: str) -> None:
            if self._log is not None:
                self._log.write(trace, outcome, time.monotonic(), question, writer.text)

        async def work() -> None:
            nonlocal logged
            await Router(self.config, tiers, chat, threshold, trace, writer, category).answer()
            logged = True
            note("ok")  # before the client has the whole answer, and so can label it
            await writer.end(trace.finish_reason or "stop", trace.prompt_tokens, trace.answer_tokens)

        try:
            if not await server.until_client_leaves(reply.receive, work, self.shutdown, self.config.limits.deadline_s):
                outcome = "client_gone"
        except BackendError as error:
            outcome = error.kind
            raise ApiError(_STATUS[error.kind], str(error), code=error.kind, retry_after=error.retry_after) from error
        except ApiError as error:
            outcome = error.code or outcome
            raise
        finally:
            if not logged:
                note(outcome)
