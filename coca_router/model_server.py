"""The local sampler behind the OpenAI API, for small models and demonstrations.

Each response is a loop over tokens on a worker thread, which ends when its client leaves. There is no batching.
"""

import codecs
import uuid
from collections.abc import Sequence
from functools import partial

import anyio
import anyio.to_thread
import jinja2
import torch
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from coca_mindspeed.local.policy import Policy
from coca_mindspeed.local.sampler import token_stream
from coca_router import http_server as server
from coca_router.http_server import AnswerWriter
from coca_router.openai_api import NEUTRAL_SAMPLING, ApiError, ChatRequest, read_request
from coca_router.output_stream import StopStrings
from coca_router.prompts import CATEGORY_HEADER, ServedPrompt, check_category

_BODY_S, _BODY_BYTES = 30.0, 4_000_000  # limits of a request's body


class ModelServer:
    """One model, served; :meth:`app` is the ASGI application.

    Attributes:
        accepted, running: requests that wait or are answered, and those that are answered.
        generated: tokens generated so far.
    """

    def __init__(
        self, policy: Policy, name: str, *, concurrent: int = 4, waiting: int = 64, max_tokens: int = 1024,
        key: str | None = None, hosts: Sequence[str] = (), form: ServedPrompt | None = None,
    ) -> None:  # fmt: skip
        """Serve ``policy`` as ``name``; further requests than ``concurrent + waiting`` get 429.

        ``form`` None: messages are rendered as they are sent.
        """
        self._policy, self.name, self._access = policy, name, server.Access(key, hosts=hosts)
        self.shutdown = server.Shutdown()
        self._form = form or ServedPrompt.without_instruction(None)
        self._concurrent, self._waiting, self._max_tokens = concurrent, waiting, max_tokens
        self._limiter: anyio.CapacityLimiter | None = None
        self.accepted = self.running = self.generated = 0
        context = getattr(policy.model.config, "max_position_embeddings", None)
        self._context = int(context) if context is not None else None

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/v1/chat/completions", server.StreamingEndpoint(self._answer), methods=["POST"]),
                Route("/v1/models", self._models, methods=["GET"]),
                Route("/v1/models/{name}", self._models, methods=["GET"]),
                Route("/health", self._health, methods=["GET"]),
            ],
            exception_handlers=server.error_handlers(),
        )

    async def _models(self, request: Request) -> Response:
        return server.models_response(request, self.name, max_model_len=self._context)

    async def _health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def _answer(self, http: Request, reply: server.Reply) -> None:
        self._access.check(http)
        request = read_request(await server.read_body(http, _BODY_BYTES, _BODY_S), self.name)
        for name, value in request.sampling().items():
            if name != "temperature" and value != NEUTRAL_SAMPLING[name]:
                raise ApiError(400, f"{name} is not supported by this server", param=name)
        if request.reasoning_effort is not None:
            raise ApiError(400, "reasoning_effort is not supported by this server", param="reasoning_effort")
        if self.accepted >= self._concurrent + self._waiting:
            raise ApiError(429, "too many requests are waiting already", retry_after=1)
        category = http.headers.get(CATEGORY_HEADER)
        check_category([self._form], category)
        prompt = self._prompt(request, category)
        if self._limiter is None:  # a limiter belongs to the event loop that it is made in
            self._limiter = anyio.CapacityLimiter(self._concurrent)
        limiter = self._limiter

        async def work() -> None:
            async with limiter:
                self.running += 1
                try:
                    await self._generate(request, prompt, reply)
                finally:
                    self.running -= 1

        self.accepted += 1
        try:
            await server.until_client_leaves(reply.receive, work, self.shutdown)
        finally:
            self.accepted -= 1

    def _prompt(self, request: ChatRequest, category: str | None) -> list[int]:
        """Token ids of the prompt; ApiError if the template refuses it, or it leaves no room for an answer."""
        tokenizer, messages = self._policy.tokenizer, self._form.messages(request, category)
        try:
            text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        except (jinja2.TemplateError, TypeError) as error:
            raise ApiError(400, f"the chat template refuses the messages: {error}", param="messages") from error
        prompt = list(tokenizer(text, add_special_tokens=False)["input_ids"])
        if not prompt or (self._context is not None and len(prompt) >= self._context):
            limit = "" if self._context is None else f" of {self._context}"
            raise ApiError(400, f"the prompt has {len(prompt)} tokens, which leaves no room in the context{limit}")
        return prompt

    async def _generate(self, request: ChatRequest, prompt: Sequence[int], reply: server.Reply) -> None:
        limit = self._max_tokens if request.limit is None else min(request.limit, self._max_tokens)
        if self._context is not None:
            limit = min(limit, self._context - len(prompt))
        generator = torch.Generator(device=self._policy.device)
        generator.seed() if request.seed is None else generator.manual_seed(request.seed)
        temperature = 1.0 if request.temperature is None else request.temperature
        stream = token_stream(self._policy, prompt, temperature=temperature, generator=generator)
        id_ = f"chatcmpl-{uuid.uuid4().hex}"
        writer = AnswerWriter(request, id_, reply, lambda: {"x-request-id": id_})
        writer.counted = len(prompt), 0
        await writer.write("")
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        stops = StopStrings(request.stops)
        count, reason = 0, None
        while reason is None:
            token = await anyio.to_thread.run_sync(partial(next, stream))
            count, self.generated = count + 1, self.generated + 1
            ended, last = token in self._policy.eos_ids, count == limit
            text = stops.feed(decoder.decode(self._policy.text.bytes_of(token)))
            if (ended or last) and not stops.stopped:
                text += stops.feed(decoder.decode(b"", final=True)) + stops.finish()
            reason = "stop" if ended or stops.stopped else "length" if last else None
            writer.counted = len(prompt), count
            await writer.write(text, [token] if request.return_token_ids else [])
        await writer.end(reason, len(prompt), count)
