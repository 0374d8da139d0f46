"""Our own sampler behind the OpenAI API, so that everything works with nothing but pip.

One response is one loop over tokens; each token is computed on a worker thread, and the loop ends when its client
leaves.  There is no continuous batching: this serves small models and demonstrations, vLLM serves the others.
"""

import codecs
import time
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
from starlette.types import Receive, Scope, Send

from coca_mindspeed.local.policy import Policy
from coca_mindspeed.local.token_stream import SampledToken, TokenStream
from coca_mindspeed.serving.asgi import Reply, answer_or_error, check_key, read_body, until_client_leaves
from coca_mindspeed.serving.openai_format import ApiError, Ask, Envelope, read_ask, usage
from coca_mindspeed.serving.stop_texts import StopTexts

_BODY_S = 30.0  # longest wait for a request's body


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
        request_bytes: int = 4_000_000,
    ) -> None:
        """Prepare.

        Args:
            policy: the model.
            name: by which clients ask for it.
            concurrent: responses generated at once.
            waiting: requests that may wait for their turn; further ones get 429.
            max_tokens: of a response, where the client names no limit or a larger one.
            key: that clients must show; None: none.
            request_bytes: a larger request is refused.
        """
        self._policy, self.name, self._key = policy, name, key
        self._waiting, self._max_tokens, self._request_bytes = waiting, max_tokens, request_bytes
        self._concurrent = concurrent
        self._limiter: anyio.CapacityLimiter | None = None
        self._accepted = 0
        context = getattr(policy.model.config, "max_position_embeddings", None)
        self._context = int(context) if context is not None else None
        self.registry = CollectorRegistry()
        self._running = Gauge("num_requests_running", "responses being generated", registry=self.registry)
        self._generated = Counter("generation_tokens", "tokens generated", registry=self.registry)

    def app(self) -> Starlette:
        """The application."""
        return Starlette(
            routes=[
                Route("/v1/chat/completions", _Endpoint(self, chat=True), methods=["POST"]),
                Route("/v1/completions", _Endpoint(self, chat=False), methods=["POST"]),
                Route("/v1/models", self._models, methods=["GET"]),
                Route("/metrics", self._metrics, methods=["GET"]),
                Route("/health", self._health, methods=["GET"]),
            ]
        )

    async def _models(self, request: Request) -> Response:
        served = {"id": self.name, "object": "model", "created": 0, "max_model_len": self._context}
        return JSONResponse({"object": "list", "data": [served]})

    async def _metrics(self, request: Request) -> Response:
        return Response(generate_latest(self.registry), media_type="text/plain; version=0.0.4")

    async def _health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def answer(self, chat: bool, request: Request, reply: Reply, receive: Receive) -> None:
        """Answer one request; its turn comes when fewer than ``concurrent`` are being generated."""
        check_key(request, self._key)
        ask = read_ask(await read_body(request, self._request_bytes, _BODY_S), chat=chat, served=self.name)
        if unknown := set(ask.others) - {"seed"}:
            raise ApiError(400, f"{min(unknown)} is not supported by this server", param=min(unknown))
        if self._accepted >= self._concurrent + self._waiting:
            raise ApiError(429, "too many requests are waiting already", retry_after=1)
        prompt = self._prompt(ask)
        if self._limiter is None:  # a limiter belongs to the event loop that it is made in
            self._limiter = anyio.CapacityLimiter(self._concurrent)
        limiter = self._limiter
        self._accepted += 1
        try:

            async def work() -> None:
                async with limiter:
                    self._running.inc()
                    try:
                        await self._generate(ask, prompt, Envelope.new(_id(chat), self.name, chat), reply)
                    finally:
                        self._running.dec()

            await until_client_leaves(receive, work)
        finally:
            self._accepted -= 1

    def _prompt(self, ask: Ask) -> list[int]:
        """Token ids of the prompt.

        Raises:
            ApiError: there are none, one is not in the vocabulary, or they leave no room for an answer.
        """
        tokenizer = self._policy.tokenizer
        if ask.prompt_ids is not None:
            prompt = list(ask.prompt_ids)
            if max(prompt) >= self._policy.text.vocabulary_size:
                raise ApiError(400, "prompt: a token id is not in the vocabulary", param="prompt")
        else:
            messages = list(ask.messages or ())
            text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
            prompt = list(tokenizer(text, add_special_tokens=False)["input_ids"])
        if not prompt or (self._context is not None and len(prompt) >= self._context):
            limit = "" if self._context is None else f" of {self._context}"
            raise ApiError(400, f"the prompt has {len(prompt)} tokens, which leaves no room in the context{limit}")
        return prompt

    async def _generate(self, ask: Ask, prompt: Sequence[int], envelope: Envelope, reply: Reply) -> None:
        limit = self._max_tokens if ask.max_tokens is None else min(ask.max_tokens, self._max_tokens)
        if self._context is not None:
            limit = min(limit, self._context - len(prompt))
        writer = _Writer(ask, prompt, envelope, reply, self._policy)
        generator = torch.Generator(device=self._policy.device)
        generator.manual_seed(int(ask.others["seed"])) if "seed" in ask.others else generator.seed()
        stream = TokenStream(
            self._policy,
            prompt,
            temperature=1.0 if ask.temperature is None else ask.temperature,
            generator=generator,
            top=ask.log_probs or 0,
        )
        await writer.begin()
        for count in range(1, limit + 1):
            token = await anyio.to_thread.run_sync(partial(next, stream))
            self._generated.inc()
            if await writer.token(token, last=count == limit):
                return


class _Writer:
    """Writes one response as its client wants it."""

    def __init__(self, ask: Ask, prompt: Sequence[int], envelope: Envelope, reply: Reply, policy: Policy) -> None:
        self._ask, self._prompt, self._envelope, self._reply, self._policy = ask, prompt, envelope, reply, policy
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._stops = StopTexts(ask.stops, include=ask.include_stop)
        self._text = ""
        self._ids: list[int] = []
        self._log_probs: list[dict[str, Any]] = []

    async def begin(self) -> None:
        if self._ask.stream:
            await self._reply.begin_stream({"x-request-id": self._envelope.id})
            ids: dict[str, Any] = {"prompt_token_ids": list(self._prompt)} if self._ask.token_ids else {}
            await self._reply.send(self._envelope.piece("", first=True, **ids))

    async def token(self, token: SampledToken, *, last: bool) -> bool:
        """Write a token; returns whether the response has ended with it."""
        written = self._policy.text.bytes_of(token.id)
        text = self._stops.feed(self._decoder.decode(written))
        ended = token.ended or last
        if ended and not self._stops.stopped:
            text += self._stops.feed(self._decoder.decode(b"", final=True)) + self._stops.finish()
        reason = "stop" if token.ended or self._stops.stopped else "length" if last else None
        self._ids.append(token.id)
        entry = self._entry(token, written) if self._ask.log_probs is not None else None
        if self._ask.stream:
            await self._reply.send(
                self._envelope.piece(text, finish_reason=reason, choice=self._choice([token.id], entry))
            )
        else:
            self._text += text
            self._log_probs += [] if entry is None else [entry]
        if reason is not None:
            await self._end(reason)
        return reason is not None

    def _choice(self, ids: Sequence[int], entry: dict[str, Any] | None) -> dict[str, Any]:
        choice: dict[str, Any] = {"token_ids": list(ids)} if self._ask.token_ids else {}
        if entry is not None:
            choice["logprobs"] = self._log_prob_object([entry])
        return choice

    def _log_prob_object(self, entries: Sequence[dict[str, Any]]) -> dict[str, Any]:
        if self._ask.messages is not None:
            return {"content": list(entries)}
        return {
            "tokens": [entry["token"] for entry in entries],
            "token_logprobs": [entry["logprob"] for entry in entries],
        }

    def _entry(self, token: SampledToken, written: bytes) -> dict[str, Any]:
        entry = _named(written, token.log_prob)
        entry["top_logprobs"] = [_named(self._policy.text.bytes_of(id_), value) for id_, value in token.top]
        return entry

    async def _end(self, reason: str) -> None:
        counted = usage(len(self._prompt), len(self._ids))
        if self._ask.stream:
            if self._ask.usage:
                await self._reply.send(self._envelope.usage_piece(counted))
            await self._reply.end_stream()
            return
        choice: dict[str, Any] = {"token_ids": self._ids} if self._ask.token_ids else {}
        if self._ask.log_probs is not None:
            choice["logprobs"] = self._log_prob_object(self._log_probs)
        ids = {"prompt_token_ids": list(self._prompt)} if self._ask.token_ids else {}
        whole = self._envelope.whole(self._text, reason, counted, choice, **ids)
        await self._reply.json(whole, {"x-request-id": self._envelope.id})


class _Endpoint:
    def __init__(self, server: ModelServer, *, chat: bool) -> None:
        self._server, self._chat = server, chat

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        reply = Reply(scope, send)
        await answer_or_error(reply, lambda: self._server.answer(self._chat, Request(scope, receive), reply, receive))


def _named(written: bytes, log_prob: float) -> dict[str, Any]:
    return {"token": written.decode("utf-8", "replace"), "bytes": list(written), "logprob": max(log_prob, -9999.0)}


def _id(chat: bool) -> str:
    return f"{'chatcmpl' if chat else 'cmpl'}-{time.time_ns():x}-{uuid.uuid4().hex[:8]}"
