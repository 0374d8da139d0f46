"""The proxy's processor time and memory, by request and by chunk: ``python -m benchmarks.proxy_processor_time``.

Clients, proxy and a simulated engine are separate processes. Answers have two lengths; the line through both gives the
cost of a request and of each chunk. Other work on the machine changes processor time less than latency.
"""

import asyncio
import cProfile
import json
import os
import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import yaml

from benchmarks.proxy_overhead import free_port, keep, load_options, process, wait_for

_CONFIDENCE = ("<confidence>", "0.9", "</confidence>")
_LENGTHS = (8, 72)
_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
_END = b"0\r\n\r\n"


def engine_process(port: int, pace_s: float) -> None:
    """An engine that answers by as many words as its question says, in vLLM's form."""

    def chunk(data: bytes) -> bytes:
        return b"%x\r\n%b\r\n" % (len(data), data)

    def event(choices: list[object], **more: object) -> bytes:
        head = {"id": f"chatcmpl-{'0' * 32}", "object": "chat.completion.chunk", "created": 1_700_000_000, "model": "m"}
        body = json.dumps({**head, "choices": choices, **more}, separators=(",", ":"))
        return chunk(b"data: " + body.encode() + b"\n\n")

    def piece(delta: dict[str, str], finish_reason: str | None = None) -> bytes:
        return event(
            [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason, "token_ids": None}]
        )

    opening = [piece({"content": text}) for text in _CONFIDENCE]
    word, last = piece({"content": " word"}), piece({"content": ""}, "stop")
    counted = event([], usage={"prompt_tokens": 7, "completion_tokens": 9, "total_tokens": 16})

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                size = int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0])
                pieces = int(json.loads(await reader.readexactly(size))["messages"][-1]["content"])
                writer.write(_HEAD + piece({"role": "assistant", "content": ""}))
                for data in [*opening, *[word] * pieces]:
                    await asyncio.sleep(pace_s)
                    writer.write(data)
                for data in (last, counted, chunk(b"data: [DONE]\n\n"), _END):
                    writer.write(data)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    async def serve() -> None:
        async with await asyncio.start_server(answer, "127.0.0.1", port, backlog=1024) as server:
            await server.serve_forever()

    asyncio.run(serve())


def proxy_process(port: int, path: str, profile: str | None) -> None:
    """The proxy of a configuration; ``/used`` names the seconds of a processor and the bytes of memory that it uses.

    ``profile`` is where that also leaves a profile of the whole process.
    """
    import uvicorn

    from coca_router.config import read_serving_config
    from coca_router.proxy import Proxy

    app = Proxy(read_serving_config(Path(path))).app()
    profiler = None if profile is None else cProfile.Profile()

    async def timed(scope, receive, send):
        if scope["type"] != "http" or scope["path"] != "/used":
            await app(scope, receive, send)
            return
        if profiler is not None:
            profiler.dump_stats(profile)
            profiler.enable()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"connection", b"close")]})
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        await send({"type": "http.response.body", "body": f"{time.process_time()!r} {resident}".encode()})

    uvicorn.run(timed, port=port, log_level="critical", access_log=False)


async def used_by_proxy(port: int) -> tuple[float, int]:
    """Seconds of a processor, and resident bytes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /used HTTP/1.1\r\nhost: x\r\n\r\n")
    answer = await reader.read()
    writer.close()
    seconds, resident = answer.partition(b"\r\n\r\n")[2].split(b"\r\n")[1].split()  # behind the one chunk's size
    return float(seconds), int(resident)


async def load(port: int, clients: int, requests: int, pieces: int, *, stream: bool) -> None:
    """Ask for ``requests`` answers of ``pieces`` pieces, ``clients`` at once."""
    messages = [{"role": "user", "content": str(pieces)}]
    body = json.dumps({"model": "coca", "messages": messages, "stream": stream}).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
    head = (head + f"content-length: {len(body)}\r\n\r\n").encode()
    left = iter(range(requests))

    async def one_client() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 24)
        for _ in left:
            writer.write(head + body)
            answer = await reader.readuntil(b"\r\n\r\n")
            size = int(answer.partition(b"content-length: ")[2].partition(b"\r\n")[0] or 0)
            answer += await (reader.readuntil(_END) if stream else reader.readexactly(size))
            words = answer.count(b" word")
            if not answer.startswith(b"HTTP/1.1 200") or (b"data: [DONE]" in answer) != stream or words != pieces:
                raise RuntimeError(f"no whole answer: {answer[-500:]!r}")
        writer.close()

    await asyncio.gather(*(one_client() for _ in range(clients)))


def measure(clients: int, requests: int, rounds: int, pace_s: float, profile: str | None) -> dict[str, float]:
    """Processor time of the proxy by request and by piece, and the memory that it holds after all requests."""
    engine, proxy = free_port(), free_port()
    config = {
        "backends": {"e": {"url": f"http://127.0.0.1:{engine}/v1", "model": "m", "dialect": "vllm"}},
        "tiers": [{"name": "t", "backend": "e", "bands": [{"at_least": 0.0, "action": "answer"}]}],
    }
    used: dict[tuple[bool, int], list[float]] = {(s, n): [] for s in (False, True) for n in _LENGTHS}
    result: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        path = Path(directory) / "serving.yaml"
        path.write_text(yaml.safe_dump(config), encoding="utf-8")
        stack.enter_context(process(engine_process, engine, pace_s))
        stack.enter_context(process(proxy_process, proxy, str(path), profile))
        wait_for(engine)
        wait_for(proxy)
        asyncio.run(load(proxy, clients, 4 * clients, _LENGTHS[0], stream=True))  # warms up
        resident = asyncio.run(used_by_proxy(proxy))[1]
        for _ in range(rounds):
            for (stream, pieces), seconds in used.items():
                before = asyncio.run(used_by_proxy(proxy))[0]
                asyncio.run(load(proxy, clients, requests, pieces, stream=stream))
                seconds.append((asyncio.run(used_by_proxy(proxy))[0] - before) / requests)
        grown = asyncio.run(used_by_proxy(proxy))[1] - resident
        result[f"MiB more after {rounds * len(used) * requests:,} requests"] = grown / 2**20
    for stream, name in ((False, "whole"), (True, "streamed")):
        short, long = (statistics.median(used[stream, pieces]) for pieces in _LENGTHS)
        piece = (long - short) / (_LENGTHS[1] - _LENGTHS[0])
        result |= {
            f"{name}: ms a request, without its pieces": 1000 * (short - piece * _LENGTHS[0]),
            f"{name}: us a piece": 1e6 * piece,
            f"{name}: ms a request of 43 pieces": 1000 * (short + piece * (40 - _LENGTHS[0])),
        }
    return result


def main() -> None:
    parser = load_options(__doc__)
    parser.add_argument("--profile", metavar="FILE", help="leave a profile of the proxy there, which slows it down")
    arguments = parser.parse_args()
    result = measure(
        arguments.clients, arguments.requests, arguments.rounds, arguments.pace_ms / 1000, arguments.profile
    )
    keep(result, arguments, "proxy_processor_time")


if __name__ == "__main__":
    main()
