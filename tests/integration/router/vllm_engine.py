"""A vLLM server of the demo's model in an environment of its own, and what its metrics say of it."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import time

import httpx

from tests.integration.router.engine_model import widen_heads
from tests.support.waiting import until

NAME = "demo"
CONTEXT = 4096
_START_S = 900


class Engine:
    """A running engine.

    Attributes:
        url: up to and including /v1.
    """

    def __init__(self, url):
        self.url = url
        self._http = httpx.Client(timeout=30)

    def metric(self, name, **labels):
        """The sum of a metric's values over the series that have these labels."""
        page = self._http.get(self.url.replace("/v1", "/metrics")).text
        found = re.findall(rf"^vllm:{name}{{(.*)}} (\S+)$", page, re.MULTILINE)
        assert found, f"the engine has no metric {name}"
        wanted = [f'{key}="{value}"' for key, value in labels.items()]
        return sum(float(value) for series, value in found if all(label in series for label in wanted))

    @property
    def running(self):
        return self.metric("num_requests_running") + self.metric("num_requests_waiting")

    @property
    def generated(self):
        return self.metric("generation_tokens_total")

    @property
    def finished(self):
        """Responses that ended by themselves and not because nobody wanted them."""
        return self.metric("request_success_total")

    def until_idle(self):
        """Wait until nothing is being generated; returns how long it took, which depends on the machine's load."""
        start = time.monotonic()
        until(lambda: not self.running, 300)
        return time.monotonic() - start


@contextlib.contextmanager
def engine(executable, model, directory):
    """Serve ``model`` by ``executable``, a ``vllm``; or take the one at VLLM_URL, which serves it already."""
    if url := os.environ.get("VLLM_URL"):
        yield Engine(url)
        return
    widen_heads(model, directory / "model", context=CONTEXT)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [executable, "serve", directory / "model", "--served-model-name", NAME, "--host", "127.0.0.1"]
    command += ["--port", str(port), "--enforce-eager", "--dtype", "float32", "--max-num-seqs", "32"]
    environment = {
        **os.environ,
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    log = directory / "vllm.log"
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment, start_new_session=True)
    try:
        base = f"http://127.0.0.1:{port}"
        end = time.monotonic() + _START_S
        while True:
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{base}/health").status_code == 200:
                    break
            assert process.poll() is None, f"vLLM ended: {log.read_text()[-3000:]}"
            assert time.monotonic() < end, f"vLLM did not start: {log.read_text()[-3000:]}"
            time.sleep(1)  # a start takes minutes, and requests would slow it down
        yield Engine(f"{base}/v1")
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
