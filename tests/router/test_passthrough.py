"""Requests with tools or a response format: they go through to a tier with ``passthrough``, without a confidence."""

import json

import openai
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
    """An engine that calls tools by these events, lists of parts (default: two calls as OpenAI's servers send them)."""

    async def events(self):
        usage = {"prompt_tokens": 9, "completion_tokens": 12}
        for parts in self.pieces or [[part] for part in PARTS]:
            yield self._event({"delta": {"role": "assistant", "content": None, "tool_calls": parts}})
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


def part(name=None, arguments=None, **more):
    """A part of a call; ``name`` and ``arguments`` are left out where they are None."""
    function = {key: value for key, value in (("name", name), ("arguments", arguments)) if value is not None}
    return {**more, **({"function": function} if function else {})}


ADD, SUB = ("c1", "add", '{"a": 1}'), ("c2", "sub", "{}")
A, B = '{"a"', ": 1}"
SIGNATURE = {"google": {"thought_signature": "x=="}}
# Events of servers that differ from OpenAI's, and the calls (id, name, arguments); "": an id of the proxy's.
OTHER_SERVERS = {
    "no number, an event each": ([[part("add", A + B, id="c1")], [part("sub", "{}", id="c2")]], [ADD, SUB]),
    "no number, one event": ([[part("add", A + B, id="c1"), part("sub", "{}", id="c2")]], [ADD, SUB]),
    "no number, in parts": ([[part("add", "", id="c1")], [part(None, A)], [part(None, B)]], [ADD]),
    "no number, an id in each part": (
        [[part("add", A, id="c1")], [part("sub", "", id="c2")], [part(None, B, id="c1")], [part(None, "{}", id="c2")]],
        [ADD, SUB],
    ),
    "no number, no id": ([[part("add", A + B)], [part("sub", "{}")]], [("", *ADD[1:]), ("", *SUB[1:])]),
    "no number, no id, one function": (
        [[part("add", A + B)], [part("add", "{}")]], [("", *ADD[1:]), ("", "add", "{}")]
    ),
    "number null": ([[part("add", A, id="c1", index=None)], [part(None, B, index=None)]], [ADD]),
    "numbers from 1": ([[part("add", A, id="c1", index=1)], [part(None, B, index=1)]], [ADD]),
    "number as text": ([[part("add", A, id="c1", index="0")], [part(None, B, index="0")]], [ADD]),
    "one number": ([[part("add", A + B, id="c1", index=0)], [part("sub", "{}", id="c2", index=0)]], [ADD, SUB]),
    "one number, in parts": (
        [[part("add", A, id="c1", index=0)], [part(None, B, index=0)], [part("sub", "", id="c2", index=0)],
         [part(None, "{}", index=0)]],
        [ADD, SUB],
    ),
    "one number and function, no id": (
        [[part("add", A + B, index=0)], [part("add", "{}", index=0)]], [("", *ADD[1:]), ("", "add", "{}")]
    ),
    "the id later": ([[part("add", A, index=0)], [part(None, B, index=0, id="c1")]], [ADD]),
    "the id later, no number": ([[part("add", A)], [part(None, B, id="c1")]], [ADD]),
    "the id alone, later": ([[part("add", A + B, index=0)], [part(index=0, id="c1")]], [ADD]),
    "the id first, alone": ([[part(index=0, id="c1")], [part("add", A + B, index=0)]], [ADD]),
    "the name later": ([[part("", "", index=0, id="c1")], [part("add", A + B, index=0)]], [ADD]),
    "no id": ([[part("add", A, index=0)], [part(None, B, index=0)]], [("", *ADD[1:])]),
    "an empty id": ([[part("add", A + B, index=0, id="")]], [("", *ADD[1:])]),
    "empty ids and names": ([[part("add", A, index=0, id="c1")], [part("", B, index=0, id="")]], [ADD]),
    "null ids and names": (
        [[part("add", A, index=0, id="c1")], [{"index": 0, "id": None, "function": {"name": None, "arguments": B}}]],
        [ADD],
    ),
    "ids and names repeated": ([[part("add", A, index=0, id="c1")], [part("add", B, index=0, id="c1")]], [ADD]),
    "repeated without a number": ([[part("add", A, id="c1")], [part("add", B, id="c1")]], [ADD]),
    "another id in each part": ([[part("add", A, index=0, id="c1")], [part(None, B, index=0, id="c9")]], [ADD]),
    "a name in parts": ([[part("a", index=0, id="c1")], [part("dd", A + B, index=0)]], [ADD]),
    "arguments as an object": ([[part("add", {"a": 1}, index=0, id="c1")]], [ADD]),
    "an empty object": ([[part("sub", {}, index=0, id="c2")]], [SUB]),
    "arguments null": ([[{"index": 0, "id": "c2", "function": {"name": "sub", "arguments": None}}],
                        [part(None, "{}", index=0)]], [SUB]),
    "function null": ([[part("add", A + B, index=0, id="c1")], [{"index": 0, "function": None}]], [ADD]),
    "other fields": ([[part("add", A, index=0, id="c1", extra_content=SIGNATURE)], [part(None, B, index=0)]], [ADD]),
    "other fields, later": (
        [[part("add", A, index=0, id="c1")], [part(None, B, index=0, extra_content=SIGNATURE)]], [ADD]
    ),
}  # fmt: skip


def joined(chunks):
    """The calls of a stream, joined as clients do: by their number, with an id and a name that come once."""
    calls = {}
    for entry in (entry for chunk in chunks for entry in chunk.choices[0].delta.tool_calls or ()):
        call = calls.setdefault(entry.index, {"id": "", "function": {"name": "", "arguments": ""}})
        call["id"] += entry.id or ""
        for name in call["function"]:
            call["function"][name] += getattr(entry.function, name, None) or ""
        call |= entry.model_extra
    assert list(calls) == list(range(len(calls)))
    return list(calls.values())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", OTHER_SERVERS)
def test_tool_calls_of_other_servers_have_openais_form(name, stream):
    events, expected = OTHER_SERVERS[name]
    with routed(Calling(*events), small_tier={"passthrough": True}) as (url, _):
        answer = client(url).chat.completions.create(model="coca", messages=QUESTION, tools=TOOLS, stream=stream)
        calls = joined(answer) if stream else [call.to_dict() for call in answer.choices[0].message.tool_calls]
    found = [(call["id"], call["function"]["name"], call["function"]["arguments"]) for call in calls]
    assert [entry[1:] for entry in found] == [entry[1:] for entry in expected]
    assert all(given == (wanted or given) for (given, *_), (wanted, *_) in zip(found, expected, strict=True))
    assert len({given for given, *_ in found} - {""}) == len(found)
    if "fields" in name:
        assert calls[0]["extra_content"] == SIGNATURE


def test_a_part_of_no_call_is_refused():
    for parts in ([part(None, "{}")], [{"function": {"arguments": ""}}], ["add"], [{"index": "x"}]):
        with (
            routed(Calling(parts), small_tier={"passthrough": True}) as (url, _),
            pytest.raises(openai.APIStatusError) as error,
        ):
            ask(url, tools=TOOLS)
        assert (error.value.status_code, error.value.code) == (502, "garbage")


def test_other_fields_of_a_call_go_back_to_the_backend():
    call = {**CALL, "extra_content": SIGNATURE}
    messages = [{"role": "assistant", "content": None, "tool_calls": [call]}, AFTER_A_CALL[1]]
    engine = FakeEngine("2")
    with routed(engine, small_tier={"passthrough": True}) as (url, _):
        body = {"model": "coca", "messages": QUESTION + messages, "tools": TOOLS}
        assert http.post(f"{url}/chat/completions", json=body).status_code == 200
    assert engine.requests[0]["messages"][1]["tool_calls"] == [call]


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
