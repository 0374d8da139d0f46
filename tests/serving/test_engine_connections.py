"""Connections to an engine, byte by byte: ends of answers, broken connections, and reuse of connections."""

import json

import httpx
import pytest

from tests.serving.servers_for_tests import (
    HEAD,
    PART,
    QUESTION,
    SURE,
    WHOLE,
    FakeEngine,
    RawEngine,
    before,
    chunk,
    routed,
    until,
)


def post(url, stream):
    body = {"model": "coca", "messages": QUESTION, "stream": stream}
    return httpx.post(f"{url}/chat/completions", json=body, timeout=60)


def texts(answer):
    """The texts of a stream's events."""
    events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: {")]
    choices = [choice for value in map(json.loads, events) for choice in value.get("choices", ())]
    return [choice["delta"]["content"] for choice in choices if choice["delta"].get("content")]


def test_chunks_that_arrive_together_are_written_together_and_counted_one_by_one():
    with before(RawEngine(HEAD + chunk(WHOLE) + chunk(b""), close=False)) as url:
        assert texts(post(url, True)) == ["\nForty-two."]
        whole = post(url, False).json()
    assert whole["choices"][0]["message"]["content"] == "\nForty-two."
    assert whole["coca"]["tokens_to_confidence"] == 5
    assert whole["usage"]["completion_tokens"] == 2


def test_text_that_arrives_together_with_garbage_is_sent():
    with before(RawEngine(HEAD + chunk(PART + b"data: {\n\n") + chunk(b""), close=False)) as url:
        assert texts(post(url, True)) == ["\nForty-two."]
        assert post(url, False).json()["error"]["code"] == "garbage"


# What goes wrong, and as what it counts; of what is no HTTP nothing is read, however it began.
BROKEN = {
    "no status": (b"what?\r\n\r\n", "unreachable"),
    "endless header": (b"HTTP/1.1 200 OK\r\nx: " + b"x" * 100_000 + b"\r\n\r\n", "unreachable"),
    "no answer": (b"", "unreachable"),
    "half a head": (HEAD[:30], "unreachable"),
    "no chunk": (HEAD + chunk(PART) + b"what?\r\n", "unreachable"),
    "half a chunk": (HEAD + chunk(PART) + b"ff\r\ndata", "cut"),
    "no last chunk": (HEAD + chunk(PART), "cut"),
    "no reason": (HEAD + chunk(PART + b"data: [DONE]\n\n") + chunk(b""), "cut"),
    "too short": (HEAD.replace(b"transfer-encoding: chunked", b"content-length: 9999") + PART, "cut"),
    "until it is closed": (HEAD.replace(b"transfer-encoding: chunked", b"connection: close") + PART, "cut"),
    "a redirection": (b"HTTP/1.1 307 Moved\r\nlocation: /v1/chat/completions\r\ncontent-length: 0\r\n\r\n", "failed"),
}


@pytest.fixture(scope="module", params=[False, True], ids=["close", "abort"])
def broken(request):
    engine = RawEngine(b"", close=True, abort=request.param)
    with before(engine) as url:
        yield engine, url


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_connection_is_an_error_of_its_kind(name, broken):
    engine, url = broken
    engine.answer, kind = BROKEN[name]
    asked, abort = engine.requests, engine.abort
    found = post(url, False)
    assert found.status_code == 502
    # What the engine said may be lost where it breaks the connection at once.
    assert found.json()["error"]["code"] in ({kind, "unreachable", "cut"} if abort else {kind})
    assert "Forty" not in found.text
    # A connection that fails before the first token is tried once more.
    assert engine.requests - asked == (2 if kind == "unreachable" else 1) or abort
    until(lambda: engine.open == 0)


def test_an_answer_is_whole_without_the_end_of_its_connection():
    engine = RawEngine(HEAD + chunk(WHOLE), close=False)
    with before(engine) as url:
        for _ in range(3):
            answer = post(url, True)
            assert "".join(texts(answer)) == "\nForty-two."
            assert answer.text.rstrip().endswith("[DONE]")
        # On no connection does anything else follow, so none is used again, and none is kept.
        assert engine.requests == 3
        until(lambda: engine.open == 0)


def test_a_connection_is_used_again_after_a_whole_answer():
    connections = set()

    class Counting(FakeEngine):
        async def chat(self, request):
            connections.add(request.client)
            return await super().chat(request)

    small = Counting(*SURE)
    with routed(small) as (url, _):
        for _ in range(20):
            assert post(url, False).status_code == 200
    # The end of an answer's message may come too late for the next request, on a busy machine.
    assert len(connections) < 15


def test_a_request_larger_than_a_megabyte_arrives_whole():
    small = FakeEngine(*SURE)
    question = [{"role": "user", "content": "é" * 1_500_000}]
    with routed(small) as (url, _):
        answer = httpx.post(f"{url}/chat/completions", json={"model": "coca", "messages": question}, timeout=60)
    assert answer.status_code == 200
    assert small.requests[0]["messages"][-1]["content"] == question[0]["content"]
