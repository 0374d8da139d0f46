"""An engine that answers by given bytes at given times, and shares no code with the proxy."""

import asyncio
import contextlib
import json
import threading

from coca_mindspeed.serving.config import ServingConfig
from coca_mindspeed.serving.proxy import Proxy
from tests.serving.background import served_in_background
from tests.serving.test_proxy import SURE

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def event(text, finish_reason=None):
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": finish_reason}
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

    def __init__(self, answer, *, close, abort=False):
        self.answer, self.close, self.abort = answer, close, abort
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
                if self.abort:
                    writer.transport.abort()
                if self.close:
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.open -= 1
            writer.close()

    @contextlib.contextmanager
    def running(self):
        """Gives its address."""
        loop = asyncio.new_event_loop()
        server = loop.run_until_complete(asyncio.start_server(self._serve, "127.0.0.1", 0))
        thread = threading.Thread(target=loop.run_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
        finally:
            asyncio.run_coroutine_threadsafe(_end(server), loop).result(10)
            loop.call_soon_threadsafe(loop.stop)
            thread.join(10)


@contextlib.contextmanager
def before(engine, *, backend=None, tier=None, **sections):
    """A proxy of this engine alone."""
    with engine.running() as address:
        bands = {} if "certificate" in (tier or {}) else {"bands": [{"at_least": 0.0, "action": "answer"}]}
        values = {
            "backends": {"e": {"url": address, "model": "m", **(backend or {})}},
            "tiers": [{"name": "t", "backend": "e", **bands, **(tier or {})}],
            **sections,
        }
        with served_in_background(Proxy(ServingConfig.model_validate(values), {}).app()) as url:
            yield url


def stream(*parts):
    """A response of these parts of an event stream, and seconds to wait between them."""
    return [HEAD, *(chunk(part) if isinstance(part, bytes) else part for part in parts), chunk(b"")]
