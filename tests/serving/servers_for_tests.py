"""Servers on sockets of this machine: an engine that does what a test wants of it, and any ASGI application."""

import asyncio
import contextlib
import json
import tempfile
import time
from pathlib import Path

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from coca_mindspeed.evaluation.predictions import read_predictions
from coca_mindspeed.serving.config import ServingConfig
from coca_mindspeed.serving.proxy import Proxy
from coca_mindspeed.serving.request_log import export_log
from coca_mindspeed.utils.files import read_json_lines
from tests.serving.background import served_in_background


class FakeEngine:
    """An engine that answers every question by ``pieces``, and goes wrong as ``fault`` says.

    Attributes:
        requests: the bodies it was asked.
        running: responses that it is generating at the moment.
        left: responses whose client left before they ended.
    """

    def __init__(self, *pieces, fault=None, delay=0.0, status=429, headers=None):
        self.pieces = list(pieces)
        self.fault, self.delay, self.status, self.headers = fault, delay, status, headers or {}
        self.requests, self.authorizations = [], []
        self.running = self.left = self.generated = 0

    def app(self):
        return Starlette(routes=[Route("/v1/chat/completions", self.chat, methods=["POST"])])

    async def chat(self, request: Request) -> Response:
        self.requests.append(json.loads(await request.body()))
        self.authorizations.append(request.headers.get("authorization"))
        if self.fault == "status":
            return JSONResponse({"error": {"message": "too long"}}, self.status, self.headers)
        if self.fault == "json":
            return JSONResponse({"choices": [{"message": {"content": "whole"}}]})
        return StreamingResponse(self.events(), media_type="text/event-stream")

    async def events(self):
        self.running += 1
        ended = False
        try:
            if self.fault == "silent":
                await asyncio.sleep(60)
            for index, piece in enumerate(self.pieces):
                await asyncio.sleep(self.delay)
                if self.fault == "killed" and index == len(self.pieces) - 1:
                    raise ConnectionError("killed")
                if self.fault == "garbage" and index == len(self.pieces) - 1:
                    yield b'data: {"choices": [{"delta": \n\n'
                self.generated += 1
                yield self.event({"delta": {"content": piece}, "index": 0, "finish_reason": None})
            if self.fault == "early":
                return
            if self.fault == "error":
                yield b'data: {"error": {"message": "out of memory"}}\n\n'
            yield self.event({"delta": {}, "index": 0, "finish_reason": "stop"})
            usage = {"prompt_tokens": 7, "completion_tokens": len(self.pieces), "total_tokens": 7 + len(self.pieces)}
            yield b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\n"
            yield b"data: [DONE]\n\n"
            ended = True
        finally:
            self.running -= 1
            self.left += not ended

    def event(self, choice):
        return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"


ESCALATE = [{"at_least": 0.7, "action": "answer"}, {"at_least": 0.0, "action": "escalate"}]


@contextlib.contextmanager
def routed(small, large=None, environment=None, small_tier=None, small_backend=None, **sections):
    """A proxy over one or two engines; gives its address and the proxy."""
    with contextlib.ExitStack() as stack:
        engines = [engine for engine in (small, large) if engine is not None]
        urls = [stack.enter_context(served_in_background(engine.app())) for engine in engines]
        values = {
            "backends": {
                name: {"url": url, "model": name, "first_token_s": 30.0, "between_tokens_s": 30.0, **(more or {})}
                for name, url, more in zip(("small", "large"), urls, (small_backend, None), strict=False)
            },
            "tiers": [
                {"name": "small", "backend": "small", "bands": ESCALATE, **(small_tier or {})},
                {"name": "large", "backend": "large", "states_confidence": False},
            ][: len(urls)],
            **sections,
        }
        proxy = Proxy(ServingConfig.model_validate(values), environment or {})
        yield stack.enter_context(served_in_background(proxy.app(), proxy.shutdown)), proxy


def exported(directory):
    """The files of a log's export."""
    with tempfile.TemporaryDirectory() as output:
        export_log(Path(directory), Path(output))
        requests = [row for _, row in read_json_lines(Path(output) / "requests.jsonl")]
        labels = Path(output) / "labelled.jsonl"
        return requests, read_predictions(labels) if labels.stat().st_size else []


def logged(directory):
    """The requests of a log."""
    return exported(directory)[0]


def labelled(directory):
    """The labelled requests of a log, as predictions."""
    return exported(directory)[1]


def until(condition, seconds=10.0):
    """Wait until ``condition`` holds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come to pass"
        time.sleep(0.02)
