"""The local sampler behind the OpenAI API, for small models and demonstrations.

Each response is a loop over tokens on a worker thread, which ends when its client leaves. There is no batching.
"""

import codecs
import uuid
from collections.abc import Sequence
from functools import partial
from typing import Any

import anyio
import anyio.to_thread
import torch
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from coca_mindspeed.local.policy import Policy
from coca_mindspeed.local.sampler import SampledToken, TokenStream
from coca_router import http_server as server
from coca_router.openai_api import (
    NEUTRAL_SAMPLING,
    AnyRequest,
    ApiError,
    ChatRequest,
    CompletionRequest,
    Envelope,
    read_request,
    usage,
)
from coca_router.output_stream import StopStrings

_BODY_S, _BODY_BYTES = 30.0, 4_000_000  # limits of a request's body


class ModelServer:
    """One model, served; :meth:`app` is the ASGI application."""

    def __init__(
        self,
        policy: Policy,
        name: str,
        *,
        concurrent: int = 4,
        waiting: int = 64,
        max_tokens: int = 1024,
        key: str | None = None,
        hosts: Sequence[str] = (),
    ) -> None:
        """Serve ``policy`` as ``name``; further requests than ``concurrent + waiting`` get 429."""
        self._policy, self.name, self._access = policy, name, server.Access(key, hosts=hosts)
        self.shutdown = server.Shutdown()
        self._concurrent, self._waiting, self._max_tokens = concurrent, waiting, max_tokens
        self._limiter: anyio.CapacityLimiter | None = None
        self._accepted = 0
        context = getattr(policy.model.config, "max_position_embeddings", None)
        self._context = int(context) if context is not None else None
        self.registry = CollectorRegistry()
        self._running = Gauge("num_requests_running", "responses being generated", registry=self.registry)
        self._generated = Counter("generation_tokens", "tokens generated", registry=self.registry)

    def app(self) -> Starlette:
        chat, completion = partial(self._answer, ChatRequest), partial(self._answer, CompletionRequest)
        return Starlette(
            routes=[
                Route("/v1/chat/completions", server.StreamingEndpoint(chat), methods=["POST"]),
                Route("/v1/completions", server.StreamingEndpoint(completion), methods=["POST"]),
                Route("/v1/models", self._models, methods=["GET"]),
                Route("/v1/models/{name}", self._models, methods=["GET"]),
                Route("/metrics", self._metrics, methods=["GET"]),
                Route("/health", self._health, methods=["GET"]),
            ],
            exception_handlers=server.error_handlers(),
        )

    async def _models(self, request: Request) -> Response:
        return server.models_response(request, self.name, max_model_len=self._context)

    async def _metrics(self, request: Request) -> Response:
        return Response(generate_latest(self.registry), media_type="text/plain; version=0.0.4")

    async def _health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def _answer(self, kind: type[AnyRequest], http: Request, reply: server.Reply) -> None:
        self._access.check(http)
        body = await server.read_body(http, _BODY_BYTES, _BODY_S)
        request = read_request(body, kind, self.name)
        for name, value in request.sampling().items():
            if name != "temperature" and value != NEUTRAL_SAMPLING[name]:
                raise ApiError(400, f"{name} is not supported by this server", param=name)
        if self._accepted >= self._concurrent + self._waiting:
            raise ApiError(429, "too many requests are waiting already", retry_after=1)
        prompt = self._prompt(request)
        if self._limiter is None:  # a limiter belongs to the event loop that it is made in
            self._limiter = anyio.CapacityLimiter(self._concurrent)
        limiter = self._limiter
        self._accepted += 1
        try:

            async def work() -> None:
                async with limiter:
                    self._running.inc()
                    try:
                        await self._generate(request, prompt, reply)
                    finally:
                        self._running.dec()

            await server.until_client_leaves(reply.receive, work, self.shutdown)
        finally:
            self._accepted -= 1

    def _prompt(self, request: AnyRequest) -> list[int]:
        """Token ids of the prompt; ApiError if one is not in the vocabulary, or there is no room for an answer."""
        tokenizer = self._policy.tokenizer
        if isinstance(request, CompletionRequest):
            prompt = list(request.prompt)
            if max(prompt) >= self._policy.text.vocabulary_size:
                raise ApiError(400, "prompt: a token id is not in the vocabulary", param="prompt")
        else:
            messages = [message.as_dict() for message in request.messages]
            text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
            prompt = list(tokenizer(text, add_special_tokens=False)["input_ids"])
        if not prompt or (self._context is not None and len(prompt) >= self._context):
            limit = "" if self._context is None else f" of {self._context}"
            raise ApiError(400, f"the prompt has {len(prompt)} tokens, which leaves no room in the context{limit}")
        return prompt

    async def _generate(self, request: AnyRequest, prompt: Sequence[int], reply: server.Reply) -> None:
        limit = self._max_tokens if request.limit is None else min(request.limit, self._max_tokens)
        if self._context is not None:
            limit = min(limit, self._context - len(prompt))
        writer = _Writer(request, prompt, self.name, reply, self._policy)
        generator = torch.Generator(device=self._policy.device)
        generator.seed() if request.seed is None else generator.manual_seed(request.seed)
        stream = TokenStream(
            self._policy,
            prompt,
            temperature=1.0 if request.temperature is None else request.temperature,
            generator=generator,
            top=(request.top_logprobs or 0) if isinstance(request, ChatRequest) else 0,
        )
        await writer.begin()
        for count in range(1, limit + 1):
            token = await anyio.to_thread.run_sync(partial(next, stream))
            self._generated.inc()
            if await writer.token(token, last=count == limit):
                return


class _Writer:
    """Writes one response, streamed or whole."""

    def __init__(
        self, request: AnyRequest, prompt: Sequence[int], model: str, reply: server.Reply, policy: Policy
    ) -> None:
        self._request, self._prompt, self._reply, self._policy = request, prompt, reply, policy
        chat = isinstance(request, ChatRequest)
        self._named = isinstance(request, ChatRequest) and bool(request.logprobs)
        id_ = f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}"
        self._envelope = Envelope(id_, model, chat=chat, usage=request.stream_usage)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._stops = StopStrings(request.stops, include=bool(request.include_stop_str_in_output))
        self._text = ""
        self._ids: list[int] = []
        self._log_probs: list[dict[str, Any]] = []

    async def begin(self) -> None:
        if self._request.stream:
            await self._reply.begin_stream({"x-request-id": self._envelope.id})
            await self._reply.send(self._envelope.chunk("", first=True, **self._prompt_ids()))

    async def token(self, token: SampledToken, *, last: bool) -> bool:
        """Write a token; returns whether the response has ended with it."""
        written = self._policy.text.bytes_of(token.id)
        text = self._stops.feed(self._decoder.decode(written))
        ended = token.ended or last
        if ended and not self._stops.stopped:
            text += self._stops.feed(self._decoder.decode(b"", final=True)) + self._stops.finish()
        reason = "stop" if token.ended or self._stops.stopped else "length" if last else None
        self._ids.append(token.id)
        entries = [self._entry(token, written)] if self._named else []
        if self._request.stream:
            choice = self._choice([token.id], entries)
            await self._reply.send(self._envelope.chunk(text, finish_reason=reason, choice=choice))
        else:
            self._text += text
            self._log_probs += entries
        if reason is not None:
            await self._end(reason)
        return reason is not None

    def _prompt_ids(self) -> dict[str, Any]:
        return {"prompt_token_ids": list(self._prompt)} if self._request.return_token_ids else {}

    def _choice(self, ids: Sequence[int], entries: Sequence[dict[str, Any]]) -> dict[str, Any]:
        choice: dict[str, Any] = {"token_ids": list(ids)} if self._request.return_token_ids else {}
        return {**choice, "logprobs": {"content": list(entries)}} if self._named else choice

    def _entry(self, token: SampledToken, written: bytes) -> dict[str, Any]:
        top = [_named(self._policy.text.bytes_of(id_), value) for id_, value in token.top]
        return {**_named(written, token.log_prob), "top_logprobs": top}

    async def _end(self, reason: str) -> None:
        counted = usage(len(self._prompt), len(self._ids))
        if self._request.stream:
            await self._reply.send(self._envelope.end(counted), more=False)
            return
        choice = self._choice(self._ids, self._log_probs)
        whole = self._envelope.whole(self._text, reason, counted, choice, **self._prompt_ids())
        await self._reply.json(whole, {"x-request-id": self._envelope.id})


def _named(written: bytes, log_prob: float) -> dict[str, Any]:
    return {"token": written.decode("utf-8", "replace"), "bytes": list(written), "logprob": max(log_prob, -9999.0)}
