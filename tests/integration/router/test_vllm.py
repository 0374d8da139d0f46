"""The proxy before vLLM itself, serving the demo's model on a CPU (`make test-router`)."""

import concurrent.futures
import contextlib
import json
import os
import socket
from pathlib import Path

import httpx
import openai
import pytest

from coca_mindspeed.algorithm.parsing import ResponseParser
from coca_mindspeed.data.arithmetic import arithmetic_records
from coca_router.config import ServingConfig
from coca_router.proxy import Proxy
from tests.integration.router.vllm_engine import NAME, engine
from tests.router.servers_for_tests import served_in_background
from tests.support.waiting import until

EXECUTABLE, MODEL = os.environ.get("VLLM"), os.environ.get("VLLM_MODEL")
pytestmark = [
    pytest.mark.skipif(EXECUTABLE is None or MODEL is None, reason="vLLM has its own environment: make test-router"),
    pytest.mark.timeout(1800),
]

JSON = "content-type: application/json"
ANSWER = [{"at_least": 0.0, "action": "answer"}]
REFUSE = [{"at_least": 0.0, "action": "refuse"}]
QUESTIONS = [record.question for record in arithmetic_records(40, "evaluate", 0)]
# Without the token that ends an answer the model writes on and on.
ENDLESS = {"logit_bias": {"1": -100}, "max_tokens": 3000}


@pytest.fixture(scope="module")
def vllm(tmp_path_factory):
    with engine(EXECUTABLE, Path(MODEL), tmp_path_factory.mktemp("vllm")) as running:
        yield running


@contextlib.contextmanager
def proxy(vllm, bands=ANSWER, tiers=None, **tier):
    values = {
        "backends": {"engine": {"url": vllm.url, "model": NAME, "dialect": "vllm"}},
        "tiers": tiers or [{"name": "small", "backend": "engine", "bands": bands, "invalid": "refuse", **tier}],
    }
    with served_in_background(Proxy(ServingConfig.model_validate(values), {}).app()) as url:
        yield url


def ask(url, question, **more):
    client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
    messages = [{"role": "user", "content": question}]
    return client.chat.completions.create(model="coca", messages=messages, temperature=0, **more)


def direct(vllm, question):
    """What the engine itself answers, taken apart by the parser of whole texts."""
    body = {"model": NAME, "messages": [{"role": "user", "content": question}], "temperature": 0}
    text = httpx.post(f"{vllm.url}/chat/completions", json=body).json()["choices"][0]["message"]["content"]
    return ResponseParser()(text)


@pytest.mark.parametrize("stream", [False, True])
def test_the_engines_answer_without_its_tag(vllm, stream):
    with proxy(vllm) as url:
        for question in QUESTIONS[:20]:
            expected = direct(vllm, question)
            answer = ask(url, question, stream=stream)
            if stream:
                pieces = list(answer)
                text = "".join(piece.choices[0].delta.content or "" for piece in pieces)
                fields, reason = pieces[-1].coca, pieces[-1].choices[0].finish_reason
            else:
                [choice] = answer.choices
                text, fields, reason = choice.message.content, answer.coca, choice.finish_reason
            if expected.confidence is None:
                assert fields["action"] == "refuse"
                continue
            assert (text, fields["confidence"], reason) == (expected.answer, expected.confidence, "stop")
            # A busy engine sends several tokens at once, and the piece that closes the tag counts whole.
            assert 6 <= fields["tokens_to_confidence"] <= fields["tokens"]["small"]


@pytest.fixture(scope="module")
def unaborted(vllm):
    """Tokens of an endless answer that nobody aborts; the engine counts it as finished."""
    finished = vllm.finished
    body = {"model": NAME, "messages": [{"role": "user", "content": QUESTIONS[0]}], **ENDLESS}
    answer = httpx.post(f"{vllm.url}/chat/completions", json=body, timeout=600).json()
    tokens = answer["usage"]["completion_tokens"]
    assert (tokens, vllm.finished) == (ENDLESS["max_tokens"], finished + 1)
    return tokens


def assert_most_were_aborted(ended, generated, unaborted):
    """Of 200 answers; without aborts all end by themselves, with ``unaborted`` tokens each.

    On a busy machine the engine runs ahead of its own HTTP server, which has to notice that the proxy has left: some
    answers end before their abort arrives.
    """
    assert ended < 100
    assert generated < 200 * unaborted / 2


def assert_only_new_answers_are_generated(vllm):
    """The engine generates the tokens of an answer that is asked for now, and no others."""
    before = vllm.generated
    body = {"model": NAME, "messages": [{"role": "user", "content": QUESTIONS[0]}], **ENDLESS, "max_tokens": 50}
    tokens = httpx.post(f"{vllm.url}/chat/completions", json=body, timeout=600).json()["usage"]["completion_tokens"]
    until(lambda: vllm.generated >= before + tokens and not vllm.running)
    assert vllm.generated == before + tokens


def test_two_hundred_answers_that_are_not_wanted_stop_the_engine(vllm, unaborted):
    before, finished = vllm.generated, vllm.finished
    slowest, read = 0.0, 0
    with proxy(vllm, REFUSE) as url, concurrent.futures.ThreadPoolExecutor(8) as pool:
        for start in range(0, 200, 8):
            answers = list(pool.map(lambda i: ask(url, QUESTIONS[i % 40], **ENDLESS), range(start, start + 8)))
            slowest = max(slowest, vllm.until_idle())
            assert {answer.coca["action"] for answer in answers} == {"refuse"}
            read += sum(answer.coca["tokens"]["small"] for answer in answers)
    generated = vllm.generated
    assert_most_were_aborted(vllm.finished - finished, generated - before, unaborted)
    assert_only_new_answers_are_generated(vllm)
    print(f"{(generated - before) / 200:.1f} tokens a request, {read / 200:.1f} of them read by the proxy, "
          f"idle after at most {slowest:.3f} s")  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
def test_two_hundred_clients_that_leave_stop_the_engine(vllm, unaborted, stream):
    before, finished = vllm.generated, vllm.finished
    slowest = most_after = 0.0
    # An invalid response is answered too: a refused one would stop before its client leaves.
    with proxy(vllm, invalid="answer") as url:
        host, port = url.removeprefix("http://").removesuffix("/v1").split(":")

        def connect(index):
            messages = [{"role": "user", "content": QUESTIONS[index % 40]}]
            body = json.dumps({"model": "coca", "messages": messages, "stream": stream, **ENDLESS}).encode()
            connection = socket.create_connection((host, int(port)), 30)
            head = (
                f"POST /v1/chat/completions HTTP/1.1\r\nhost: {host}\r\n{JSON}\r\ncontent-length: {len(body)}\r\n\r\n"
            )
            connection.sendall(head.encode() + body)
            return connection

        for start in range(0, 200, 8):
            in_the_middle = vllm.generated + 8 * 10
            connections = [connect(index) for index in range(start, start + 8)]
            until(lambda tokens=in_the_middle: vllm.running >= 8 and vllm.generated >= tokens)
            for connection in connections:
                connection.close()
            after = vllm.generated
            slowest = max(slowest, vllm.until_idle())
            most_after = max(most_after, vllm.generated - after)
    generated = vllm.generated
    assert_most_were_aborted(vllm.finished - finished, generated - before, unaborted)
    assert_only_new_answers_are_generated(vllm)
    print(f"{(generated - before) / 200:.1f} tokens a request, {most_after:g} at most after 8 clients had left, "
          f"idle after at most {slowest:.3f} s")  # fmt: skip


def test_the_next_tier_goes_on_where_the_first_is_left(vllm):
    tiers = [
        {"name": "small", "backend": "engine", "bands": [{"at_least": 0.0, "action": "escalate"}]},
        {"name": "large", "backend": "engine", "bands": ANSWER, "invalid": "answer"},
    ]
    with proxy(vllm, tiers=tiers) as url:
        expected = direct(vllm, QUESTIONS[1])
        answer = ask(url, QUESTIONS[1])
    assert (answer.coca["tier"], answer.choices[0].message.content) == ("large", expected.answer)
    assert answer.coca["tokens"]["small"] < answer.coca["tokens"]["large"]
