"""An application served from a thread of this process."""

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from coca_router.http_server import Server, Shutdown


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
