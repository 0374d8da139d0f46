"""Latency that the proxy adds to an engine called directly: ``python -m benchmarks.proxy_overhead``.

The engine is a separate process that sends chunks at a steady pace, or a real engine (``--engine``); direct and proxied
requests take turns in one run.
"""

import argparse
import asyncio
import json
import multiprocessing
import socket
import statistics
import tempfile
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import yaml

from coca_mindspeed.utils.json_files import write_json

_CHUNKS = ("<confidence>", "0.9", "</confidence>", *(" word" for _ in range(40)))


def engine_process(port: int, pace_s: float) -> None:
    """An engine that answers everything by the same chunks."""
    import uvicorn
    from starlette.applications import Starlette
    from starlette.responses import StreamingResponse
    from starlette.routing import Route

    def event(choice: object) -> bytes:
        return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"

    async def chunks():
        for chunk in _CHUNKS:
            await asyncio.sleep(pace_s)
            yield event({"delta": {"content": chunk}, "finish_reason": None})
        yield event({"delta": {}, "finish_reason": "stop"})
        yield b"data: [DONE]\n\n"

    async def chat(request):
        return StreamingResponse(chunks(), media_type="text/event-stream")

    app = Starlette(routes=[Route("/v1/chat/completions", chat, methods=["POST"])])
    uvicorn.run(app, port=port, log_level="critical", access_log=False)


def proxy_process(port: int, path: str) -> None:
    """The proxy of a configuration."""
    import uvicorn

    from coca_router.config import read_serving_config
    from coca_router.proxy import Proxy

    uvicorn.run(Proxy(read_serving_config(Path(path))).app(), port=port, log_level="critical", access_log=False)


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def process(target, *arguments):
    """A process of its own, ended with the block."""
    started = multiprocessing.get_context("spawn").Process(target=target, args=arguments, daemon=True)
    started.start()
    try:
        yield
    finally:
        started.terminate()
        started.join(10)


def wait_for(port: int) -> None:
    """Until somebody listens."""
    for _ in range(600):
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
        except OSError:
            time.sleep(0.1)
        else:
            return
    raise TimeoutError(f"nobody listens on {port}")


async def load(url: str, model: str, clients: int, requests: int, *, stripped: bool) -> tuple[list[float], float]:
    """Seconds to the first text of each request, and requests a second; ``clients`` at once.

    Args:
        url: up to and including /v1.
        model: to be asked.
        clients: at once.
        requests: in all.
        stripped: whether the confidence has been taken off; else the first text is the first behind it.
    """
    first: list[float] = []
    left = iter(range(requests))
    messages = [{"role": "user", "content": "What is 6 times 7?"}]
    body = {"model": model, "messages": messages, "stream": True, "max_tokens": 64}
    async with httpx.AsyncClient(timeout=120, limits=httpx.Limits(max_connections=None)) as client:

        async def one_client() -> None:
            for _ in left:
                start = time.perf_counter()
                text, seen = "", False
                async with client.stream("POST", f"{url}/chat/completions", json=body) as response:
                    response.raise_for_status()
                    async for line in response.aiter_lines():
                        if seen or not line.startswith("data: {"):
                            continue
                        for choice in json.loads(line.removeprefix("data: "))["choices"]:
                            text += choice["delta"].get("content") or ""
                        seen = bool(text if stripped else text.partition("</confidence>")[2])
                        if seen:
                            first.append(time.perf_counter() - start)

        start = time.perf_counter()
        await asyncio.gather(*(one_client() for _ in range(clients)))
        return first, requests / (time.perf_counter() - start)


def measure(
    clients: int, requests: int, rounds: int, pace_s: float, engine: tuple[str, str] | None
) -> dict[str, float]:
    """Median and 99th percentile of the time to the first text in ms, and requests a second, of both ways.

    ``engine`` is the address and the model of a real one.
    """
    own, proxy = free_port(), free_port()
    url, model = engine or (f"http://127.0.0.1:{own}/v1", "m")
    config = {
        "backends": {"e": {"url": url, "model": model}},
        "tiers": [{"name": "t", "backend": "e", "bands": [{"at_least": 0.0, "action": "answer"}], "invalid": "answer"}],
    }
    ways = {"direct": (url, model), "proxy": (f"http://127.0.0.1:{proxy}/v1", "coca")}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    rates: dict[str, list[float]] = {name: [] for name in ways}
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        path = Path(directory) / "serving.yaml"
        path.write_text(yaml.safe_dump(config), encoding="utf-8")
        if engine is None:
            stack.enter_context(process(engine_process, own, pace_s))
            wait_for(own)
        stack.enter_context(process(proxy_process, proxy, str(path)))
        wait_for(proxy)
        for number in range(rounds + 1):
            for name, (url, model) in ways.items():
                first, rate = asyncio.run(load(url, model, clients, requests, stripped=name == "proxy"))
                if number:  # the first round warms up
                    seconds[name] += first
                    rates[name].append(rate)
    result: dict[str, float] = {}
    for name, values in seconds.items():
        cuts = statistics.quantiles(values, n=100)
        result |= {
            f"{name}, median ms to first text": 1000 * statistics.median(values),
            f"{name}, p99 ms to first text": 1000 * cuts[98],
            f"{name}, requests/s": statistics.median(rates[name]),
        }
    result["added, median ms"] = result["proxy, median ms to first text"] - result["direct, median ms to first text"]
    return result


def load_options(description: str | None) -> argparse.ArgumentParser:
    """A parser of how the proxy is loaded, and where the figures go."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--clients", type=int, default=32, help="at once (default: 32)")
    parser.add_argument("--requests", type=int, default=320, help="a round (default: 320)")
    parser.add_argument("--rounds", type=int, default=3, help="default: 3")
    parser.add_argument("--pace-ms", type=float, default=20.0, help="between two chunks of the engine (default: 20)")
    parser.add_argument("--output", type=Path, default=Path("runs/bench"), help="default: runs/bench")
    return parser


def keep(result: dict[str, float], arguments: argparse.Namespace, name: str) -> None:
    """Print figures and write them where ``--output`` says."""
    for figure, value in result.items():
        print(f"{figure:40s} {value:10.2f}")
    write_json(arguments.output / f"{name}.json", {"clients": arguments.clients, "results": result})


def main() -> None:
    parser = load_options(__doc__)
    parser.add_argument("--engine", metavar="URL", help="a real engine instead, up to and including /v1")
    parser.add_argument("--model", help="its name at --engine")
    arguments = parser.parse_args()
    if (arguments.engine is None) != (arguments.model is None):
        parser.error("--engine and --model belong together")
    engine = None if arguments.engine is None else (arguments.engine, arguments.model)
    result = measure(arguments.clients, arguments.requests, arguments.rounds, arguments.pace_ms / 1000, engine)
    keep(result, arguments, "proxy_overhead")


if __name__ == "__main__":
    main()
