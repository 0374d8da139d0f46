"""Limits that hold before any key is checked, keys, web pages, and a proxy that is told to stop."""

import contextlib
import json
import signal
import socket
import threading

import httpx
import pytest

from tests.router.servers_for_tests import (
    CLIENT_SECONDS,
    QUESTION,
    SURE,
    TICK,
    WHOLE,
    FakeEngine,
    RawEngine,
    address,
    http,
    proxy_process,
    routed,
    served_in_background,
    stream,
)
from tests.support.waiting import until

pytestmark = pytest.mark.timing

BODY = {"model": "coca", "messages": QUESTION}


def status_of(connection):
    """The status that a connection is answered by; None where it is closed without one."""
    answer = b""
    while part := connection.recv(65536):
        answer += part
    return int(answer.split()[1]) if answer else None


HEADS = {
    "one endless header": b"GET /health HTTP/1.1\r\na: " + b"x" * 1_000_000,
    "an endless path": b"GET /" + b"x" * 1_000_000,
    "headers that never end": b"GET /health HTTP/1.1\r\na: b\r\n",
    "nothing": b"",
}


@pytest.fixture(scope="module")
def impatient():
    """The address of a proxy that waits briefly for headers."""
    with routed(FakeEngine(*SURE)) as (_, proxy), served_in_background(proxy.app(), header_s=5 * TICK) as url:
        yield url


@pytest.mark.parametrize("name", HEADS)
def test_heads_are_bounded_in_size_and_time(name, impatient):
    with socket.create_connection(address(impatient), timeout=30) as connection:
        with contextlib.suppress(ConnectionError):  # it is closed while the rest of a large head is on its way
            connection.sendall(HEADS[name])
            assert status_of(connection) is None
        assert http.get(f"{impatient}/models").status_code == 200


def test_a_slow_second_request_on_a_connection_is_ended_too(impatient):
    with socket.create_connection(address(impatient), timeout=30) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert b"200 OK" in connection.recv(65536)
        connection.sendall(b"GET /health HTTP/1.1\r\n")
        assert status_of(connection) is None


def test_the_number_of_connections_is_bounded():
    with routed(FakeEngine(*SURE)) as (_, proxy), served_in_background(proxy.app(), connections=5) as url:
        connections = [socket.create_connection(address(url), timeout=30) for _ in range(5)]
        until(lambda: http.get(f"{url}/models").status_code == 503)
        for connection in connections:
            connection.close()
        until(lambda: http.get(f"{url}/models").status_code == 200)


def headers(**more):
    return {"content-type": "application/json", **{name.replace("_", "-"): value for name, value in more.items()}}


# Headers of a request without a key, and its status; the proxy knows the host router.lan and one page.
PAGES = [
    (headers(), 200),
    (headers(content_type="application/json; charset=utf-8"), 200),
    (headers(content_type="text/plain"), 415),
    (headers(content_type="application/x-www-form-urlencoded"), 415),
    (headers(host="localhost:80"), 200),
    (headers(host="[::1]:80"), 200),
    (headers(host="192.0.2.1"), 200),
    (headers(host="router.lan"), 200),
    (headers(host="router.lan:8080"), 200),
    (headers(host="evil.example"), 403),
    (headers(host="evil.example:80"), 403),
    (headers(host="127.0.0.1.evil.example"), 403),
    (headers(host=""), 403),
    (headers(origin="http://evil.example"), 403),
    (headers(origin="null"), 403),
    (headers(origin="http://page.lan"), 200),
]


@pytest.mark.parametrize("key", [None, "secret"])
def test_a_web_page_cannot_use_a_proxy_without_a_key(key):
    listen = {"hosts": ["router.lan"], "origins": ["http://page.lan"], "api_key_env": key and "KEY"}
    small = FakeEngine(*SURE)
    with routed(small, listen=listen, environment={"KEY": "secret"}) as (url, _):
        for sent, status in PAGES:
            if key:  # which no page has
                sent, status = {**sent, "authorization": f"Bearer {key}"}, 415 if status == 415 else 200
            answer = http.post(f"{url}/chat/completions", content=json.dumps(BODY), headers=sent)
            assert answer.status_code == status, sent
        assert http.get(f"{url}/models", headers={"host": "evil.example"}).status_code == (401 if key else 403)
    assert len(small.requests) == sum(status == 200 or (key is not None and status == 403) for _, status in PAGES)


PAGE, ASKED = "http://page.lan", "authorization,content-type,x-coca-domain,x-stainless-os"


@pytest.mark.parametrize("key", [None, "secret"])
def test_a_preflight_is_answered_before_the_key_is_checked(key):
    listen = {"origins": [PAGE], "api_key_env": key and "KEY"}
    with routed(FakeEngine(*SURE), listen=listen, environment={"KEY": "secret"}) as (url, _):
        for origin, method, status in ((PAGE, "POST", 200), (PAGE, "PUT", 400), ("http://e", "POST", 400)):
            asked = {"origin": origin, "access-control-request-method": method, "access-control-request-headers": ASKED}
            answer = http.options(f"{url}/chat/completions", headers=asked)
            assert answer.status_code == status
            assert answer.headers.get("access-control-allow-origin") == (PAGE if origin == PAGE else None)
            if status == 200:
                allowed = answer.headers["access-control-allow-headers"].split(",")
                assert set(ASKED.split(",")) <= {name.strip() for name in allowed}


@pytest.mark.parametrize("streamed", [False, True])
def test_a_page_may_read_answers_and_errors(streamed, monkeypatch):
    sent = {"origin": PAGE}
    with (
        routed(FakeEngine(*SURE), listen={"origins": [PAGE]}) as (url, _),
        httpx.Client(headers=sent, timeout=CLIENT_SECONDS) as http,
    ):
        body = {**BODY, "stream": streamed}
        answers = [http.post(f"{url}/chat/completions", json=b) for b in (body, {**body, "model": "gpt"})]
        monkeypatch.setattr("coca_router.router.decide", None)
        answers.append(http.post(f"{url}/chat/completions", json=body))
    assert [answer.status_code for answer in answers] == [200, 404, 500]
    assert {answer.headers.get("access-control-allow-origin") for answer in answers} == {PAGE}
    assert "x-coca-confidence" in answers[0].headers["access-control-expose-headers"]


def test_labels_have_a_key_of_their_own(tmp_path):
    listen = {"api_key_env": "CHAT", "admin_key_env": "ADMIN"}
    keys = {"CHAT": "chat", "ADMIN": "admin"}
    with routed(FakeEngine(*SURE), listen=listen, environment=keys, log={"directory": str(tmp_path)}) as (url, _):
        id_ = "none"
        for key, chat, admin in (("chat", 200, 401), ("admin", 401, 200), ("x", 401, 401)):
            shown = {"authorization": f"Bearer {key}"}
            answer = http.post(f"{url}/chat/completions", json=BODY, headers=shown)
            assert answer.status_code == chat
            id_ = answer.json().get("id", id_)
            label = http.post(f"{url}/coca/labels", json={"id": id_, "correct": True}, headers=shown)
            assert label.status_code == admin


def test_bad_labels(tmp_path):
    with routed(FakeEngine(*SURE), log={"directory": str(tmp_path)}) as (url, _):
        for body in (
            *(b"[" * 9000, b"{", b"[]", b'{"id": "x"}', b'{"id": 7, "correct": true}', b'{"id": "x", "correct": 1}'),
            *(b'{"id": "x", "correct": true, "more": 1}', b"\xff"),
        ):
            answer = http.post(f"{url}/coca/labels", content=body, headers=headers())
            assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error"), body


@pytest.mark.slow
@pytest.mark.parametrize("drain", [20, 5 * TICK])
def test_at_sigterm_requests_end_or_get_an_error(drain, tmp_path):
    answers, begun, backend = {}, [], RawEngine(stream(WHOLE[:-60], 20 * TICK, WHOLE[-60:]), close=False)
    with backend.served() as engine, proxy_process(tmp_path, engine, limits={"drain_s": drain}) as (url, process):

        def asks(streamed):
            with http.stream("POST", f"{url}/chat/completions", json={**BODY, "stream": streamed}) as answer:
                begun.append(streamed)
                answer.read()
            answers[streamed] = answer

        asking = [threading.Thread(target=asks, args=(streamed,)) for streamed in (False, True)]
        for thread in asking:
            thread.start()
        until(lambda: backend.requests == 2 and True in begun)
        process.send_signal(signal.SIGTERM)
        for thread in asking:
            thread.join(120)
        assert process.wait(120) in (0, -signal.SIGTERM)
    whole, streamed = answers[False], answers[True].text
    if drain == 20:
        assert whole.json()["choices"][0]["message"]["content"] == "Forty-two."
        assert streamed.rstrip().endswith("[DONE]")
        return
    assert (whole.status_code, whole.json()["error"]["code"]) == (503, "shutting_down")
    error = json.loads(streamed.strip().splitlines()[-1].removeprefix("data: "))["error"]
    assert error["code"] == "shutting_down"
    assert "[DONE]" not in streamed
