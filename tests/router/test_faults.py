"""Engines and clients that misbehave: an error in OpenAI's form or the fallback that the policy names, never a half."""

import json
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta, timezone
from email.utils import format_datetime
from http.client import HTTPResponse

import openai
import pytest
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

import coca_router.proxy as proxy_module
from tests.router.servers_for_tests import (
    QUESTION,
    SURE,
    TICK,
    FakeEngine,
    RawEngine,
    ask,
    before,
    event,
    http,
    logged,
    raw_post,
    routed,
    served_in_background,
    stream,
)
from tests.support.waiting import Clock, until

pytestmark = pytest.mark.timing

# What goes wrong, and the status that a client sees where there is no tier to fall back on.
FAULTS = {
    "killed": ({"fault": "killed"}, 502),
    "early": ({"fault": "early"}, 502),
    "garbage": ({"fault": "garbage"}, 502),
    "error": ({"fault": "error"}, 502),
    "json": ({"fault": "json"}, 502),
    "silent": ({"fault": "silent"}, 504),
    "busy": ({"fault": "status", "status": 429, "headers": {"retry-after": "7"}}, 429),
    "down": ({"fault": "status", "status": 503}, 502),
    "our_key": ({"fault": "status", "status": 401}, 502),
    "too_long": ({"fault": "status", "status": 400}, 400),
    "no_log_probs": ({}, 502),  # of a tier that decides by them
}
BY_LOG_PROB = {"confidence": {"source": "answer_logprob"}}


JSON = {"content-type": "application/json"}


def timeouts(name):
    """A short wait where the engine is silent; nothing else may fail because this machine is busy."""
    return {"first_token_s": 2 * TICK, "between_tokens_s": 2 * TICK} if name == "silent" else None


@pytest.mark.parametrize("name", FAULTS)
def test_the_next_tier_answers_or_an_openai_error_is_returned(name, tmp_path, caplog):
    """The proxy's own log has one line of it, which names backend, error and request, and holds no text."""
    fault, status = FAULTS[name]
    how = {"small_backend": timeouts(name), "small_tier": BY_LOG_PROB if name == "no_log_probs" else None}
    with routed(FakeEngine(*SURE, **fault), **how, log={"directory": str(tmp_path)}) as (url, _):
        with pytest.raises(openai.APIStatusError) as error:
            ask(url)
        assert error.value.status_code == status
        assert set(shown := error.value.response.json()["error"]) == {"message", "type", "param", "code"}
        assert ("too long: \\ud800" in shown["message"]) == (name == "too_long")
        assert error.value.response.headers.get("retry-after") == ("7" if name == "busy" else None)
    [row] = logged(tmp_path)
    [line] = [record.getMessage() for record in caplog.records if record.name.startswith("coca_router")]
    assert all(word in line for word in ("small", row["outcome"], row["id"]))
    assert not any(text in line for text in (QUESTION[0]["content"], "too long"))
    with routed(FakeEngine(*SURE, **fault), FakeEngine("LARGE"), **how) as (url, _):
        answer = ask(url)
        assert (answer.choices[0].message.content, answer.coca["tier"]) == ("LARGE", "large")


@pytest.mark.parametrize("name", ["killed", "early", "garbage", "error"])
def test_half_an_answer_in_a_stream_ends_in_an_error_and_is_not_finished(name, tmp_path):
    fault, _ = FAULTS[name]
    with routed(FakeEngine(*SURE, **fault), log={"directory": str(tmp_path)}) as (url, _):
        with pytest.raises(openai.APIError):
            list(ask(url, stream=True))
        raw = http.post(f"{url}/chat/completions", json={"model": "coca", "messages": QUESTION, "stream": True}).text
    assert "[DONE]" not in raw
    assert '"finish_reason": "stop"' not in raw
    assert json.loads(raw.strip().splitlines()[-1].removeprefix("data: "))["error"]["type"] == "server_error"
    assert {row["outcome"] for row in logged(tmp_path)} <= {"cut", "garbage", "failed"}


def test_an_endless_answer_ends_at_the_deadline():
    small = FakeEngine(*SURE, *["."] * 1000, delay=TICK / 2)
    with routed(small, limits={"deadline_s": 4 * TICK}) as (url, _):
        with pytest.raises(openai.APIStatusError) as error:
            ask(url)
        assert error.value.status_code == 504
        until(lambda: small.running == 0)


def test_a_pause_that_the_engine_asked_for_is_kept():
    small = FakeEngine(*SURE, fault="status", headers={"retry-after": "60"})
    with routed(small, FakeEngine("LARGE")) as (url, _):
        for _ in range(3):
            assert ask(url).coca["tier"] == "large"
    assert len(small.requests) == 1


@pytest.fixture(params=["UTC", "Asia/Tokyo", "America/Lima"])
def clock_of(request, monkeypatch):
    """The time zone of this machine."""
    monkeypatch.setenv("TZ", request.param)
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.mark.usefixtures("clock_of")
@pytest.mark.parametrize("zone", [timezone.utc, None])  # a date without a zone is meant as GMT
def test_a_pause_may_be_a_date(zone):
    date = (datetime.now(timezone.utc) + timedelta(seconds=60)).replace(tzinfo=zone)
    small = FakeEngine(*SURE, fault="status", headers={"retry-after": format_datetime(date, usegmt=zone is not None)})
    with routed(small) as (url, _), pytest.raises(openai.RateLimitError) as error:
        ask(url)
    assert 50 < int(error.value.response.headers["retry-after"]) <= 60


def test_a_pause_that_is_no_date_is_ignored():
    endless = "Fri, 01 Jan 2021 00:00:00 +99999999999999"
    small = FakeEngine(*SURE, fault="status", headers={"retry-after": endless})
    with routed(small) as (url, _), pytest.raises(openai.RateLimitError) as error:
        ask(url)
    assert error.value.response.headers.get("retry-after") is None


# Bodies of an engine's 400, and what the client is told of them.
MESSAGES = [
    ({"error": {"message": "too long"}}, "too long"),
    ({"error": "too long"}, "too long"),
    ({"object": "error", "message": "too long", "type": "BadRequestError", "code": 400}, "too long"),  # vLLM 0.10.0
    ({"detail": "too long"}, "too long"),
    ({"detail": [{"loc": ["body", "seed"], "msg": "too long"}]}, "body.seed: too long"),
    (["no object"], "400"),
]


@pytest.mark.parametrize(("body", "message"), MESSAGES)
def test_the_message_of_an_engine_reaches_the_client(body, message):
    sent = json.dumps(body).encode()
    head = b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(sent)
    with before(RawEngine(head + sent, close=True)) as url, pytest.raises(openai.BadRequestError) as error:
        ask(url)
    assert error.value.body["message"].endswith(f"rejected the request: {message}")


def test_an_error_of_an_older_vllm_in_a_stream_is_a_failure():
    sent = event(SURE[0]) + b'data: {"object": "error", "message": "out of memory", "code": 400}\n\n'
    with before(RawEngine(stream(sent), close=False)) as url, pytest.raises(openai.APIStatusError) as error:
        ask(url)
    assert error.value.code == "failed"


DOWN = {"url": "http://127.0.0.1:9/v1"}


def test_a_backend_that_cannot_be_reached_is_named_with_its_address():
    large = FakeEngine("LARGE", fault="status", status=503)
    with (
        routed(FakeEngine(*SURE), large, small_backend=DOWN) as (url, _),
        pytest.raises(openai.APIStatusError) as error,
    ):
        ask(url)
    assert error.value.code == "failed"
    assert all(part in error.value.body["message"] for part in ("small", "127.0.0.1:9", "large", "503"))


def test_an_answer_after_a_failure_says_so():
    with routed(FakeEngine(*SURE), FakeEngine("LARGE"), small_backend=DOWN) as (url, _):
        answer = ask(url)
    assert answer.coca["tier"] == "large"
    assert "small failed: unreachable" in answer.coca["reason"]


@pytest.mark.parametrize(
    ("policy", "status"),
    [({}, 200), ({"on_error": "escalate"}, 200), ({"on_error": "fail"}, 503), ({"caps": {"escalations": 0}}, 503)],
)
def test_readiness_is_that_of_the_backends_which_can_answer(policy, status):
    with routed(FakeEngine(*SURE), FakeEngine("LARGE"), small_backend=DOWN, **policy) as (url, _):
        found = http.get(f"{url.removesuffix('/v1')}/ready")
    assert found.status_code == status
    assert found.json()["status"] == ("ready" if status == 200 else "unready")
    assert found.json()["backends"]["small"] == "ClientConnectorError"  # and no address, which everybody would see
    assert found.json()["backends"]["large"] == "ok"


def test_backends_are_asked_for_their_readiness_at_most_once_a_second(monkeypatch):
    """Anybody may ask the proxy, which has no key there."""
    clock, asked = Clock(monkeypatch, proxy_module), []
    monkeypatch.setattr(clock, "monotonic", lambda: 100.0 + clock.ahead)  # it stands still, however busy the machine

    class Listing(FakeEngine):
        def served(self):
            async def models(request):
                asked.append(request.method)
                return JSONResponse({"data": []})

            return served_in_background(Starlette(routes=[Route("/v1/models", models)]))

    with routed(Listing()) as (url, _), ThreadPoolExecutor(8) as pool:
        ready = f"{url.removesuffix('/v1')}/ready"
        for looks in (1, 2):
            answers = list(pool.map(lambda _: http.get(ready).status_code, range(8)))
            assert (answers, asked) == ([200] * 8, ["GET"] * looks)
            clock.ahead += 1.0


def test_no_backend_no_readiness():
    with routed(FakeEngine(*SURE), small_backend=DOWN) as (url, _):
        root = url.removesuffix("/v1")
        assert (http.get(f"{root}/ready").status_code, http.get(f"{root}/health").status_code) == (503, 200)


@pytest.mark.parametrize(("path", "status"), [("/v1", 200), ("", 503)])
def test_a_server_without_chats_at_its_address_is_not_ready(path, status):
    """The engine lists no models at either address."""
    small = FakeEngine(*SURE)
    with (
        small.served() as address,
        routed(small, small_backend={"url": address.removesuffix("/v1") + path}) as (url, _),
    ):
        found = http.get(f"{url.removesuffix('/v1')}/ready")
    assert found.status_code == status
    problem = found.json()["backends"]["small"]
    assert problem == "ok" if status == 200 else "backends.small.url" in problem and "127.0.0.1" not in problem


def test_no_further_tier_is_asked_with_on_error_fail():
    failing = {"small_backend": {"url": "http://127.0.0.1:9/v1"}, "on_error": "fail"}
    with (
        routed(FakeEngine(*SURE), FakeEngine("LARGE"), **failing) as (url, _),
        pytest.raises(openai.APIStatusError) as error,
    ):
        ask(url)
    assert (error.value.status_code, error.value.code) == (502, "unreachable")


@pytest.mark.parametrize("stream", [False, True])
def test_the_engine_stops_when_the_client_leaves(stream, tmp_path):
    small = FakeEngine(*SURE, *[" and so on"] * 10_000, delay=0.02)
    with routed(small, log={"directory": str(tmp_path)}) as (url, proxy):
        with raw_post(url, json.dumps({"model": "coca", "messages": QUESTION, "stream": stream}).encode()):
            until(lambda: small.generated > 8)
        until(lambda: proxy.running == 0)
        until(lambda: small.running == 0)
        assert (len(small.requests), small.left) == (1, 1)  # it did not end by itself, and was not asked again
    [row] = logged(tmp_path)
    assert row["outcome"] == "client_gone"


TEXT = b'"messages": [{"role": "user", "content": "x"}]'
BAD_BODIES = {
    "no JSON": b"{",
    "no object": b"[1]",
    "not UTF-8": b"\xff\xfe",
    "deep": b"[" * 100_000,
    "no messages": b'{"model": "coca"}',
    "wrong role": b'{"model": "coca", "messages": [{"role": "king", "content": "x"}]}',
    "picture": b'{"model": "coca", "messages": [{"role": "user", "content": [{"type": "image_url"}]}]}',
    "half a character": b'{"model": "coca", "messages": [{"role": "user", "content": "\\ud800"}]}',
    "no model": b"{%b}" % TEXT,
    "half a model": b'{"model": "\\ud800", %b}' % TEXT,
    **{
        key.decode(): b'{"model": "coca", %b, %b}' % (key, TEXT)
        for key in (
            b'"temperature": NaN', b'"seed": 1e30', b'"seed": ' + b"1" * 5000, b'"\\ud800": 1',
            b'"logit_bias": {"\\ud800": "a"}', b'"stop": "\\ud800"',
        )
    },
}  # fmt: skip


def test_bad_requests_are_refused_and_nothing_is_asked_for_them():
    small = FakeEngine(*SURE)
    with routed(small, limits={"request_bytes": 1_000_000}) as (url, _):
        for name, body in BAD_BODIES.items():
            answer = http.post(f"{url}/chat/completions", content=body, headers=JSON)
            assert answer.status_code == 400, name
            assert answer.json()["error"]["message"], name
        other = http.post(f"{url}/chat/completions", json={"model": "gpt", "messages": QUESTION})
        assert (other.status_code, other.json()["error"]["code"]) == (404, "model_not_found")
        large = b'{"model": "coca", "messages": [{"role": "user", "content": "' + b"x" * 10_000_000 + b'"}]}'
        assert http.post(f"{url}/chat/completions", content=large, headers=JSON).status_code == 413

        def in_parts():
            for start in range(0, len(large), 65536):
                yield large[start : start + 65536]

        assert http.post(f"{url}/chat/completions", content=in_parts(), headers=JSON).status_code == 413
        assert http.get(f"{url}/nothing").status_code == 404
        near = http.post(f"{url.removesuffix('/v1')}/chat/completions", json={})
        assert (near.status_code, "'/v1/chat/completions'" in near.json()["error"]["message"]) == (404, True)
        assert http.get(f"{url}/chat/completions").status_code == 405
    assert not small.requests


def test_a_body_that_never_ends_frees_its_place():
    small = FakeEngine(*SURE)
    with routed(small, limits={"concurrent": 1, "body_s": 20 * TICK}) as (url, proxy):
        with raw_post(url, b"{", length=100) as connection:
            until(lambda: proxy.running == 1)
            assert http.post(f"{url}/chat/completions", json={}).status_code == 429
            answer = HTTPResponse(connection)
            answer.begin()
            assert (answer.status, json.load(answer)["error"]["code"]) == (408, "request_timeout")
        until(lambda: proxy.running == 0)
        assert ask(url).coca["tier"] == "small"


@pytest.mark.parametrize("stream", [False, True])
def test_an_internal_error_has_openais_form(stream, monkeypatch):
    def broken(*_):
        raise ZeroDivisionError("a secret of the request")

    with routed(FakeEngine(*SURE)) as (url, proxy):
        monkeypatch.setattr("coca_router.router.decide", broken)
        answer = http.post(f"{url}/chat/completions", json={"model": "coca", "messages": QUESTION, "stream": stream})
        assert answer.status_code == 500
        assert answer.json()["error"]["code"] == "internal_error"
        assert "secret" not in answer.text
        until(lambda: proxy.running == 0)
