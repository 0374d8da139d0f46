"""Engines for tests, a well-behaved one and one that answers by raw bytes, with proxies in front of them."""

import asyncio
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import uvicorn.server
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from coca_mindspeed.evaluation.predictions import read_predictions
from coca_mindspeed.utils.json_files import read_json_lines
from coca_router.config import ServingConfig
from coca_router.http_server import Server, Shutdown
from coca_router.proxy import Proxy
from coca_router.request_log import export_log
from tests.support.waiting import until

#: Seconds: timeouts and waits of tests are multiples of it, so that one number trades their time for their patience.
TICK = 0.1
CLIENT_SECONDS = 60.0  # for which a client waits: a test that lets it wait fails
SURE = ("<conf", "idence>", "0.9", "</confidence", ">\nForty", "-two", ".")
UNSURE = ("<confidence>", "0.2", "</confidence>", *["no "] * 200)
QUESTION = [{"role": "user", "content": "What is 6 times 7?"}]

# Each request has a connection of its own.
http = httpx.Client(timeout=CLIENT_SECONDS, limits=httpx.Limits(max_keepalive_connections=0))


def client(url, key="none"):
    return openai.OpenAI(base_url=url, api_key=key, max_retries=0, timeout=CLIENT_SECONDS)


def ask(url, **more):
    return client(url).chat.completions.create(model="coca", messages=QUESTION, **more)


class FakeEngine:
    """An engine that answers every question by ``pieces``, and goes wrong as ``fault`` says.

    ``log_probs`` has a number for each piece.

    Attributes:
        requests: the bodies it was asked.
        running: responses that it is generating at the moment.
        left: responses whose client left before they ended.
    """

    def __init__(self, *pieces, fault=None, delay=0.0, status=429, headers=None, log_probs=None):
        self.pieces, self.log_probs = list(pieces), log_probs
        self.fault, self.delay, self.status, self.headers = fault, delay, status, headers or {}
        self.requests, self.authorizations = [], []
        self.running = self.left = self.generated = 0

    def served(self):
        return served_in_background(Starlette(routes=[Route("/v1/chat/completions", self.chat, methods=["POST"])]))

    async def chat(self, request: Request) -> Response:
        self.requests.append(json.loads(await request.body()))
        self.authorizations.append(request.headers.get("authorization"))
        if self.fault == "status":
            content = b'{"error": {"message": "too long: \\ud800"}}'  # half a character
            return Response(content, self.status, self.headers, "application/json")
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
                yield event(piece, log_prob=self.log_probs and self.log_probs[index])
            if self.fault == "early":
                return
            if self.fault == "error":
                yield b'data: {"error": {"message": "out of memory"}}\n\n'
            yield event("", "stop")
            usage = {"prompt_tokens": 7, "completion_tokens": len(self.pieces), "total_tokens": 7 + len(self.pieces)}
            yield b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\n"
            yield b"data: [DONE]\n\n"
            ended = True
        finally:
            self.running -= 1
            self.left += not ended


ANSWER = [{"at_least": 0.0, "action": "answer"}]
ESCALATE, REFUSE = (
    [{"at_least": 0.7, "action": "answer"}, {"at_least": 0.0, "action": below}] for below in ("escalate", "refuse")
)


@contextmanager
def routed(small, large=None, environment=None, small_tier=None, small_backend=None, **sections):
    """A proxy over one or two engines; gives its address and the proxy."""
    with ExitStack() as stack:
        engines = [engine for engine in (small, large) if engine is not None]
        urls = [stack.enter_context(engine.served()) for engine in engines]
        values = {
            "backends": {
                name: {"url": url, "model": name, "first_token_s": 30.0, "between_tokens_s": 30.0, **(more or {})}
                for name, url, more in zip(("small", "large"), urls, (small_backend, None), strict=False)
            },
            "tiers": [
                {"name": "small", "backend": "small", "bands": ESCALATE if large else REFUSE, **(small_tier or {})},
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


HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def event(text, finish_reason=None, log_prob=None):
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": finish_reason}
    if log_prob is not None:
        choice["logprobs"] = {"content": [{"token": text, "logprob": log_prob, "bytes": None, "top_logprobs": []}]}
    return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"


def chunk(data):
    return b"%x\r\n%b\r\n" % (len(data), data)


WHOLE = b"".join(map(event, SURE)) + event("", "stop") + b"data: [DONE]\n\n"
PART = b"".join(map(event, SURE))


async def _end(server):
    """No connection is served any more: what is left of one would end with the loop already closed."""
    server.close()
    serving = asyncio.all_tasks() - {asyncio.current_task()}
    for task in serving:
        task.cancel()
    await asyncio.gather(*serving, return_exceptions=True)


class RawEngine:
    """Answers every request by the same bytes, and then closes the connection or keeps it.

    Attributes:
        answer: bytes, or a list of bytes and of seconds to wait between them.
        requests: number of requests.
        bodies: their JSON.
        open: connections.
    """

    def __init__(self, answer, *, close):
        self.answer, self.close = answer, close
        self.requests = self.open = 0
        self.bodies = []

    async def _serve(self, reader, writer):
        self.open += 1
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                size = int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0])
                self.bodies.append(json.loads(await reader.readexactly(size)))
                self.requests += 1
                for part in [self.answer] if isinstance(self.answer, bytes) else self.answer:
                    if isinstance(part, bytes):
                        writer.write(part)
                        await writer.drain()
                    else:
                        await asyncio.sleep(part)
                if self.close:
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.open -= 1
            writer.close()

    @contextmanager
    def served(self):
        """Gives its address."""
        loop = asyncio.new_event_loop()
        server = loop.run_until_complete(asyncio.start_server(self._serve, "127.0.0.1", 0))
        thread = threading.Thread(target=loop.run_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
        finally:
            asyncio.run_coroutine_threadsafe(_end(server), loop).result(60)
            loop.call_soon_threadsafe(loop.stop)
            thread.join(10)


@contextmanager
def before(engine, *, backend=None, tier=None, **sections):
    """A proxy of this engine alone, which answers whatever the confidence; gives its address."""
    with routed(engine, small_backend=backend, small_tier={"bands": ANSWER, **(tier or {})}, **sections) as (url, _):
        yield url


def stream(*parts):
    """A response of these parts of an event stream, and seconds to wait between them."""
    return [HEAD, *(chunk(part) if isinstance(part, bytes) else part for part in parts), chunk(b"")]


def address(url):
    host, port = url.removeprefix("http://").removesuffix("/v1").split(":")
    return host, int(port)


def raw_post(url, body, *, length=None, end="keep-alive"):
    """A connection on which a chat completion was asked for, with a body of ``length`` bytes by its header."""
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\nconnection: {end}\r\n"
    head += f"content-type: application/json\r\ncontent-length: {len(body) if length is None else length}\r\n\r\n"
    connection = socket.create_connection(address(url), timeout=60)
    connection.sendall(head.encode() + body)
    return connection


@contextmanager
def proxy_process(directory, engine, **sections):
    """``serve`` as a process, before the engine at this address; gives the proxy's address and the process."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    config = {
        "listen": {"port": port},
        "backends": {"e": {"url": engine, "model": "m"}},
        "tiers": [{"name": "t", "backend": "e", "bands": ANSWER}],
        **sections,
    }
    (directory / "serving.yaml").write_text(json.dumps(config))
    command = [sys.executable, "-m", "coca_router", "serve", str(directory / "serving.yaml")]
    url = f"http://127.0.0.1:{port}/v1"

    def listens():
        try:
            return http.get(f"{url}/models").status_code == 200
        except httpx.ConnectError:
            return False

    with subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}) as process:
        try:
            until(listens, 60)
            yield url, process
        finally:
            process.terminate()
            process.wait(30)


class _ShortSleeps:
    """``asyncio`` for uvicorn's server, which sleeps a tenth of a second, or several, whenever it stops."""

    def __getattr__(self, name):
        return getattr(asyncio, name)

    async def sleep(self, seconds):
        await asyncio.sleep(seconds * TICK / 5)


uvicorn.server.asyncio = _ShortSleeps()


class _Stoppable(Server):
    """A server that stops at once; uvicorn's looks ten times a second whether it should."""

    async def main_loop(self) -> None:
        self.loop, self.stop = asyncio.get_running_loop(), asyncio.Event()
        await self.stop.wait()


@contextmanager
def served_in_background(app: Any, shutdown: Shutdown | None = None, **options: Any) -> Iterator[str]:
    """Serve an ASGI application on a free port of 127.0.0.1; gives its address up to and including ``/v1``.

    Raises:
        RuntimeError: it did not start.
    """
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        server = _Stoppable(app, shutdown or Shutdown(), **{"drain_s": 0.0, **options})
        server.config.timeout_graceful_shutdown = 1 + int(server.config.timeout_graceful_shutdown or 5) - 5
        server.config.log_level = "critical"
        thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])), daemon=True)
        thread.start()
        try:
            while not hasattr(server, "stop"):
                thread.join(0.005)
                if not thread.is_alive():
                    raise RuntimeError("the application ended before it was served")
            yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        finally:
            if thread.is_alive():
                server.loop.call_soon_threadsafe(server.stop.set)
            thread.join(10)
