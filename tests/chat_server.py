"""A stub of an OpenAI-compatible server with one model, ``tiny``."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class ChatServer(ThreadingHTTPServer):
    """Answers chat completions by ``reply(request) -> (status, text)``; keeps what it sees.

    Attributes:
        raw: gives the body of every reply, whatever ``reply`` says.
        missing_bytes: by how much a reply is shorter than its header says.
        byte_seconds: pause after each byte of a reply.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.reply: Callable[[dict[str, Any]], tuple[int, Any]] = lambda request: (200, "CORRECT")
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.at_once = self.most_at_once = 0
        self.raw: Callable[[], bytes] | None = None
        self.missing_bytes, self.byte_seconds, self.retry_after_ms = 0, 0.0, 1
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"


class _Handler(BaseHTTPRequestHandler):
    server: ChatServer

    def do_GET(self) -> None:
        wrong = self.headers.get("Authorization") == "Bearer wrong"
        self._send(401 if wrong else 200, {"object": "list", "data": [{"id": "tiny", "object": "model"}]})

    def do_POST(self) -> None:
        server, request = self.server, json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with server.lock:
            server.requests.append(request)
            server.keys.append(self.headers.get("Authorization"))
            server.at_once += 1
            server.most_at_once = max(server.most_at_once, server.at_once)
        status, text = server.reply(request) if request["model"] == "tiny" else (404, "no such model")
        with server.lock:
            server.at_once -= 1
        message = text if isinstance(text, dict) else {"content": text}
        choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", **message}}
        body = {"id": "1", "object": "chat.completion", "created": 0, "model": "tiny", "choices": [choice]}
        body["usage"] = {"prompt_tokens": 3, "completion_tokens": 7, "total_tokens": 10}
        self._send(status, body if status == 200 else {"error": {"message": text}})

    def _send(self, status: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode() if self.server.raw is None else self.server.raw()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data) + self.server.missing_bytes))
        self.send_header("Retry-After-Ms", str(self.server.retry_after_ms))
        self.end_headers()
        with suppress(OSError):  # the client has gone
            if not self.server.byte_seconds:
                self.wfile.write(data)
                return
            for byte in data:
                self.wfile.write(bytes([byte]))
                time.sleep(self.server.byte_seconds)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def chat_server() -> Iterator[ChatServer]:
    server = ChatServer()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()
