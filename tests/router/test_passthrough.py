"""Requests with tools or a response format: they go through to a tier with ``passthrough``, without a confidence."""

import json

import pytest

from tests.router.servers_for_tests import (
    QUESTION,
    SURE,
    FakeEngine,
    ask,
    client,
    http,
    labelled,
    logged,
    routed,
)

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
CALL = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
# Further messages of a conversation with tools, as clients send them.
AFTER_A_CALL = [{"role": "assistant", "content": None, "tool_calls": [CALL]},
                {"role": "tool", "tool_call_id": "call_1", "content": "2"}]  # fmt: skip
PARTS = [
    {"index": 0, "id": "call_1", "type": "function", "function": {"name": "add", "arguments": ""}},
    {"index": 0, "function": {"arguments": '{"a"'}},
    {"index": 0, "function": {"arguments": ": 1}"}},
    {"index": 1, "id": "call_2", "type": "function", "function": {"name": "add", "arguments": "{}"}},
]
CALLS = [CALL, {"id": "call_2", "type": "function", "function": {"name": "add", "arguments": "{}"}}]


class Calling(FakeEngine):
    """An engine that calls two tools, in parts."""

    async def events(self):
        usage = {"prompt_tokens": 9, "completion_tokens": 12}
        for part in PARTS:
            yield self._event({"delta": {"role": "assistant", "content": None, "tool_calls": [part]}})
        yield self._event({"delta": {}, "finish_reason": "tool_calls"}, usage=usage)
        yield b"data: [DONE]\n\n"

    def _event(self, choice, **more):
        return b"data: " + json.dumps({"choices": [{"index": 0, **choice}], **more}).encode() + b"\n\n"


# Parameters of a request; those of them that the backend gets, besides messages and model.
PASSED = [
    {"tools": TOOLS},
    {"tools": TOOLS, "tool_choice": "none", "parallel_tool_calls": False, "temperature": 0.5},
    {"response_format": {"type": "json_object"}},
    {"messages": QUESTION + AFTER_A_CALL, "tools": TOOLS},
    {"messages": QUESTION + AFTER_A_CALL},
    {"tools": TOOLS, "max_tokens": 50},
]


@pytest.mark.parametrize(
    "tier", [{"passthrough": True}, {"passthrough": True, "confidence": {"source": "mean", "samples": 3}}]
)
def test_such_requests_reach_the_tier_as_they_are(tier, tmp_path):
    small = FakeEngine('{"a":', " 1}")
    with routed(small, FakeEngine("LARGE"), small_tier=tier, log={"directory": str(tmp_path)}) as (url, _):
        for more in PASSED:
            body = {"model": "coca@0.7", "messages": QUESTION, **more}
            answer = http.post(f"{url}/chat/completions", json=body).json()
            label = {"id": answer["id"], "correct": True}
            assert http.post(f"{url}/coca/labels", json=label).status_code == 200
            given = {name: value for name, value in body.items() if name != "model"}
            assert {name: small.requests[-1][name] for name in given} == given
            assert answer["choices"][0]["message"]["content"] == '{"a": 1}'
            found = (answer["model"], answer["coca"]["tier"], answer["coca"]["confidence"])
            assert found == ("coca@0.7", "small", None)
    assert [prediction.confidence for prediction in labelled(tmp_path)] == [None] * len(PASSED)
    assert [row["tokens"] for row in logged(tmp_path)] == [{"small": 2}] * len(PASSED)


def test_other_requests_are_decided_by_the_confidence():
    small = FakeEngine(*SURE)
    with routed(small, small_tier={"passthrough": True}) as (url, _):
        for more in ({}, {"extra_body": {"tools": [], "response_format": {"type": "text"}}}):
            assert ask(url, **more).coca["confidence"] == 0.9
    assert not any("tools" in body or "response_format" in body for body in small.requests)


@pytest.mark.parametrize("stream", [False, True])
def test_tool_calls_come_back(stream):
    with routed(Calling(), small_tier={"passthrough": True}) as (url, _):
        answer = client(url).chat.completions.create(model="coca", messages=QUESTION, tools=TOOLS, stream=stream)
        if not stream:
            [choice] = answer.choices
            assert [call.to_dict() for call in choice.message.tool_calls] == CALLS
            assert (choice.message.content, choice.finish_reason) == (None, "tool_calls")
            assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (9, 12)
            return
        chunks = list(answer)
        parts = [c.to_dict() for chunk in chunks for c in chunk.choices[0].delta.tool_calls or ()]
        assert parts == PARTS
        assert chunks[-1].choices[0].finish_reason == "tool_calls"
        assert chunks[-1].coca["action"] == "answer"


REFUSED = [
    {"tools": TOOLS, "n": 2},
    {"tools": TOOLS, "logprobs": True},
    {"tools": TOOLS, "functions": [{}]},
    {"messages": [{"role": "user", "content": None}], "tools": TOOLS},
]


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e999"])
@pytest.mark.parametrize("name", ["tools", "response_format", "tool_calls"])
def test_numbers_that_are_not_finite_are_refused(name, number):
    field = f'"{name}": [{{"x": {number}}}]'
    messages = f'[{{"role": "user", "content": "q"}}, {{"role": "assistant", "content": null, {field}}}]'
    more = f'"messages": {messages}' if name == "tool_calls" else f'"messages": {json.dumps(QUESTION)}, {field}'
    small = FakeEngine(*SURE)
    with routed(small, small_tier={"passthrough": True}) as (url, _):
        body, kind = f'{{"model": "coca", {more}}}', {"content-type": "application/json"}
        answer = http.post(f"{url}/chat/completions", content=body, headers=kind)
    assert (answer.status_code, small.requests) == (400, [])


def test_other_parameters_stay_refused():
    small = FakeEngine(*SURE)
    with routed(small, small_tier={"passthrough": True}) as (url, _):
        for more in REFUSED:
            answer = http.post(f"{url}/chat/completions", json={"model": "coca", "messages": QUESTION, **more})
            assert (answer.status_code, small.requests) == (400, [])
