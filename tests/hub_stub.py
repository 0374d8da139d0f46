"""A hub on this machine: the few answers of huggingface.co that a download needs."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha1
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@contextmanager
def hub(models: dict[str, Path]) -> Iterator[str]:
    """Serve directories as models by id; the address, for ``HF_ENDPOINT``.  The model ``org/gated`` needs a login."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = self.path.partition("?")[0].removeprefix("/api/models/").strip("/")
            name = "/".join(path.split("/")[:2])
            if name == "org/gated":
                self._answer(b"{}", 403, {"X-Error-Code": "GatedRepo"})
            elif name not in models:
                self._answer(b"{}", 404, {"X-Error-Code": "RepoNotFound"})
            elif "/tree/" in path:  # huggingface_hub 2
                tree = [
                    {"type": "file", "path": f.name, "size": f.stat().st_size, "oid": sha1(f.read_bytes()).hexdigest()}
                    for f in models[name].iterdir()
                ]
                self._answer(json.dumps(tree).encode(), 200, {"Content-Type": "application/json"})
            elif self.path.startswith("/api/"):
                files = [{"rfilename": f.name, "size": f.stat().st_size} for f in models[name].iterdir()]
                info = {"_id": "1", "id": name, "modelId": name, "sha": COMMIT, "private": False, "siblings": files}
                self._answer(json.dumps(info).encode(), 200, {"Content-Type": "application/json"})
            else:
                content = (models[name] / Path(path).name).read_bytes()
                self._answer(content, 200, {"X-Repo-Commit": COMMIT, "ETag": f'"{sha1(content).hexdigest()}"'})

        do_HEAD = do_GET  # noqa: N815

        def _answer(self, content: bytes, status: int, headers: dict[str, str]) -> None:
            self.send_response(status)
            for key, value in {**headers, "Content-Length": str(len(content))}.items():
                self.send_header(key, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
