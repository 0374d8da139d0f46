"""The protocol at both ends: streams of engines, connections, parameters and answers of clients, timeouts."""

import itertools
import json

import openai
import pytest

from tests.router.servers_for_tests import (
    CLIENT_SECONDS,
    HEAD,
    PART,
    QUESTION,
    SURE,
    TICK,
    WHOLE,
    FakeEngine,
    RawEngine,
    ask,
    before,
    chunk,
    client,
    event,
    http,
    logged,
    routed,
    stream,
)
from tests.support.waiting import until
from tests.tables import read_table

pytestmark = pytest.mark.timing


def data(value):
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def delta(content, reason=None, **more):
    return {"choices": [{"index": 0, "delta": {"content": content}, "finish_reason": reason}], **more}


USAGE = {"prompt_tokens": 7, "completion_tokens": 9, "total_tokens": 16}
END = b"data: [DONE]\n\n"
# Streams that engines send, each of which is the answer of SURE.
STREAMS = {
    "finish reason ''": b"".join(data(delta(text, "")) for text in SURE) + data(delta("", "stop")) + END,
    "finish reason 'null'": b"".join(data(delta(text, "null")) for text in SURE) + data(delta("", "stop")) + END,
    "error null": b"".join(data(delta(text, error=None)) for text in SURE) + data(delta("", "stop")) + END,
    "usage null": b"".join(data(delta(text, usage=None)) for text in SURE) + data(delta("", "stop")) + END,
    "choices null": WHOLE.replace(END, data({"choices": None, "usage": USAGE})) + END,
    "role first": data({"choices": [{"delta": {"role": "assistant", "content": None}}]}) + WHOLE,
    "reason with the last text": b"".join(map(event, SURE[:-1])) + event(SURE[-1], "stop") + END,
    "all in one": event("".join(SURE), "stop") + END,
    "no [DONE]": WHOLE.removesuffix(END),
    "CRLF": WHOLE.replace(b"\n", b"\r\n"),
    "no blank": WHOLE.replace(b"data: ", b"data:"),
    "several data lines": WHOLE.replace(b', "finish', b',\ndata: "finish'),
    "usage without choices": WHOLE.replace(END, data({"usage": USAGE})) + END,
    "a ping before the usage": WHOLE.replace(END, data({"type": "ping"}) + data({"choices": [], "usage": USAGE})) + END,
    "usage in floats": WHOLE.replace(END, data({"choices": [], "usage": {n: float(c) for n, c in USAGE.items()}}))
    + END,
    "usage in text": WHOLE.replace(END, data({"choices": [], "usage": {"prompt_tokens": "7"}})) + END,
    "usage that is no object": b"".join(data(delta(text, usage=[7])) for text in SURE) + event("", "stop") + END,
    "an error after the answer": WHOLE.replace(END, data({"error": {"message": "late"}})) + END,
    "an abort after the answer": WHOLE.replace(END, event("", "abort")) + END,
    "half JSON after the answer": WHOLE.replace(END, b"data: {\n\n") + END,
    "a long line after the answer": WHOLE.replace(END, b"data: " + b"x" * 3_000_000) + END,
    "more text after the answer": WHOLE.replace(END, event("more", "length")) + END,
    "fields and comments": b": hi\n" + WHOLE.replace(b"data: {", b"event: message\nid: 7\nretry: 5\ndata: {"),
}


@pytest.fixture(scope="module")
def raw():
    """An engine whose answer a test sets, and the address of a proxy before it that refuses invalid confidences."""
    engine = RawEngine(b"", close=False)
    with before(engine, tier={"invalid": "refuse"}, refusal="No.") as url:
        yield engine, url


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("name", STREAMS)
def test_the_streams_of_engines(name, cut, raw):
    (engine, url), sent = raw, STREAMS[name]
    step = (7 if len(sent) < 10_000 else 100_003) if cut else len(sent)
    engine.answer = stream(*(sent[i : i + step] for i in range(0, len(sent), step)))
    answer = ask(url)
    assert answer.choices[0].message.content == "Forty-two."
    assert answer.choices[0].finish_reason == "stop"
    assert answer.coca["confidence"] == 0.9
    if "usage" in name:
        counted = name in ("usage without choices", "a ping before the usage", "usage in floats")
        assert (answer.usage and answer.usage.prompt_tokens) == (7 if counted else None)


ENDLESS = int(2 * CLIENT_SECONDS / TICK)  # pauses of a TICK: for longer than the client waits


@pytest.mark.parametrize("after", ["nothing", "pings"])
def test_a_whole_answer_does_not_wait_for_its_usage(after):
    """Neither a short ``between_tokens_s`` nor endless events after the finish reason lose it."""
    pings = [part for _ in range(ENDLESS) for part in (data({"type": "ping"}), TICK)]
    engine = RawEngine(stream(WHOLE.removesuffix(END), *(pings if after == "pings" else [ENDLESS * TICK])), close=False)
    with before(engine, backend={"between_tokens_s": 3 * TICK}) as url:
        assert ask(url).choices[0].message.content == "Forty-two."


@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n"])
@pytest.mark.parametrize("streamed", [False, True])
def test_characters_and_ends_of_events_may_be_split_between_network_chunks(end, streamed, raw):
    engine, url = raw
    text = "<confidence>0.9</confidence>é 漢 🙂\u2028x"
    events = [json.dumps(delta(text), ensure_ascii=False).encode(), json.dumps(delta("", "stop")).encode(), b"[DONE]"]
    sent = b"".join(b"data: " + each + end for each in events)
    edges = [i for i, byte in enumerate(sent) if byte > 0x7F or byte in b"\r\n"]
    parts = [sent[a:b] for a, b in itertools.pairwise([0, *edges, len(sent)])]
    engine.answer = stream(*(each for part in parts for each in (part, 0.005)))  # the waits keep the chunks apart
    answer = ask(url, stream=streamed)
    given = answer.choices[0].message.content if not streamed else "".join(
        chunk.choices[0].delta.content or "" for chunk in answer
    )  # fmt: skip
    assert given == "é 漢 🙂\u2028x"


HALF = rb'data: {"choices": [{"delta": {"content": "\ud83d"}}]}' + b"\n\n"
# Streams that hold no whole answer, and the code of the error.
NOT_WHOLE = {
    "ends without a reason": (PART, "cut"),
    "only empty reasons": (b"".join(data(delta(text, "")) for text in SURE) + END, "cut"),
    "nothing": (END, "cut"),
    "only comments": (b": hi\n\n", "cut"),
    "only a reason": (event("", "stop") + END, None),
    "aborted": (PART + event("", "abort") + END, "failed"),
    "half a character": (PART + HALF + event("", "stop") + END, "garbage"),
    "a long line": (PART + b"data: " + b"x" * 3_000_000, "garbage"),
    **{
        data: (PART + b"data: " + data.encode("latin-1") + b"\n\n" + event("", "stop") + END, "garbage")
        for data in (
            *("{", "{}", "7", '{"choices": 7}', '{"choices": [{"delta": {"content": "\xff"}}]}'),
            *('{"choices": [{"delta": {"content": 7}}]}', '{"choices": [{"delta": {}, "finish_reason": 7}]}'),
            *('{"choices": [{"delta": {"content": "a"}, "token_ids": ["b"]}]}', "[" * 100_000),
        )
    },
    "error": (PART + data({"error": {"message": "out of memory"}}), "failed"),
}


@pytest.mark.parametrize("name", NOT_WHOLE)
def test_an_incomplete_stream_is_an_error_or_a_decision(name, raw):
    """Never an empty answer with status 200."""
    (engine, url), (sent, code) = raw, NOT_WHOLE[name]
    engine.answer = stream(sent)
    if code is None:  # an empty response has no valid confidence
        answer = ask(url)
        assert (answer.choices[0].message.content, answer.coca["action"]) == ("No.", "refuse")
        return
    with pytest.raises(openai.APIStatusError) as error:
        ask(url)
    assert (error.value.status_code, error.value.code) == (502, code)


@pytest.mark.parametrize("dialect", ["openai", "vllm"])
def test_tokens_are_the_engines_count_where_it_counts_them(dialect, tmp_path):
    counted = event("<confidence>0.9</confidence>") + event("Forty-two of them") + event("", "stop")
    ids = [[1, 2, 3], [4, 5, 6, 7, 8, 9], []]
    if dialect == "vllm":
        choices = [json.loads(line[6:])["choices"][0] for line in counted.split(b"\n\n") if line]
        counted = b"".join(data({"choices": [{**c, "token_ids": i}]}) for c, i in zip(choices, ids, strict=True))
    sent = counted + data({"choices": [], "usage": USAGE}) + END
    log = {"directory": str(tmp_path)}
    with before(RawEngine(stream(sent), close=False), backend={"dialect": dialect}, log=log) as url:
        answer = ask(url)
    assert answer.coca["tokens"] == {"small": 9}
    assert answer.coca["tokens_to_confidence"] == (1 if dialect == "openai" else 3)
    assert answer.usage.completion_tokens == (8 if dialect == "openai" else 6)
    assert answer.usage.prompt_tokens == 7
    assert logged(tmp_path)[0]["answer_tokens"] == answer.usage.completion_tokens


def usage_so_far(text, tokens):
    """A chunk of vLLM with ``continuous_usage_stats``."""
    return data(delta(text, usage={"prompt_tokens": 7, "completion_tokens": tokens, "total_tokens": 7 + tokens}))


@pytest.mark.parametrize("counts", [True, False])
def test_the_prompts_tokens_are_those_of_the_tier_that_answered(counts, tmp_path):
    texts = ("<confidence>", "0.2", "</confidence>", " no")
    unsure = b"".join(usage_so_far(text, count) for count, text in enumerate(texts, 1))
    small = RawEngine(stream(unsure + event("", "stop") + END), close=False)
    answer = event("LARGE") + event("", "stop") + data({"choices": [], "usage": {**USAGE, "prompt_tokens": 5}})
    large = RawEngine(stream(answer + END if counts else event("LARGE") + event("", "stop") + END), close=False)
    with routed(small, large, small_backend={"dialect": "vllm"}, log={"directory": str(tmp_path)}) as (url, _):
        given = ask(url)
    assert given.coca["tier"] == "large"
    assert (given.usage and given.usage.prompt_tokens) == (5 if counts else None)
    assert logged(tmp_path)[0]["prompt_tokens"] == (5 if counts else None)


KEEP_ALIVE = {
    "comments": b": ping\n\n",
    "roles": data({"choices": [{"delta": {"role": "assistant", "content": ""}}]}),
    "usage so far": data({"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 0}}),
    "usage so far with an empty text": data(delta("", usage={"prompt_tokens": 7, "completion_tokens": 0})),
}


@pytest.mark.parametrize("where", ["before the first token", "between two tokens"])
@pytest.mark.parametrize("name", KEEP_ALIVE)
def test_keep_alive_events_do_not_prolong_timeouts(name, where):
    pings = [part for _ in range(300) for part in (KEEP_ALIVE[name], TICK / 10)]  # the answer ends after them
    sent = [*pings, WHOLE] if where == "before the first token" else [PART, *pings, event("", "stop")]
    limits = {"first_token_s": 2 * TICK, "between_tokens_s": 2 * TICK}
    with before(RawEngine(stream(*sent), close=False), backend=limits) as url:
        with pytest.raises(openai.APIStatusError) as error:
            ask(url)
        assert (error.value.status_code, error.value.code) == (504, "timeout")


def test_tokens_that_come_in_time_may_take_long_together():
    sent = [part for text in SURE for part in (event(text), 2 * TICK)] + [event("", "stop") + END]
    with before(
        RawEngine(stream(*sent), close=False), backend={"first_token_s": 5, "between_tokens_s": 10 * TICK}
    ) as url:
        assert ask(url).choices[0].message.content == "Forty-two."


def test_a_connection_that_breaks_before_the_first_token_is_tried_once_more():
    class Fickle(RawEngine):
        async def _serve(self, reader, writer):
            if self.requests == 0:
                await reader.readuntil(b"\r\n\r\n")
                self.requests += 1
                writer.close()
                return
            await super()._serve(reader, writer)

    engine = Fickle(stream(WHOLE), close=False)
    with before(engine) as url:
        assert ask(url).choices[0].message.content == "Forty-two."
    assert engine.requests == 2
    broken = RawEngine([HEAD, chunk(PART)], close=True)
    with before(broken) as url, pytest.raises(openai.APIStatusError):
        ask(url)
    assert broken.requests == 1  # some of the answer had come


PARAMETERS = [(json.loads(more), refused) for more, refused in read_table(__file__, "client_parameters.tsv")]
ACCEPTED = [more for more, refused in PARAMETERS if not refused]
REFUSED = [(more, refused) for more, refused in PARAMETERS if refused] + [({"messages": QUESTION * 1001}, "messages")]


def test_parameters_of_clients():
    small = FakeEngine(*SURE)
    with routed(small) as (url, _):
        for more in ACCEPTED:
            answer = http.post(f"{url}/chat/completions", json={"model": "coca", "messages": QUESTION, **more})
            assert answer.status_code == 200, (more, answer.text)
        assert [m["name"] for body in small.requests for m in body["messages"] if "name" in m] == ["ann"]
        asked = len(small.requests)
        for more, param in REFUSED:
            answer = http.post(f"{url}/chat/completions", json={"model": "coca", "messages": QUESTION, **more})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), more
            told = "passthrough" in answer.json()["error"]["message"]
            assert told or param not in ("tools", "tool_choice", "response_format", "n", "logprobs"), more
    assert len(small.requests) == asked


def test_answers_have_the_fields_of_openais():
    with routed(FakeEngine(*SURE)) as (url, _):
        body = {"model": "coca", "messages": QUESTION}
        [choice] = http.post(f"{url}/chat/completions", json=body).json()["choices"]
        assert choice["message"] == {"role": "assistant", "content": "Forty-two.", "refusal": None}
        assert choice["logprobs"] is None
        counted = {"stream": True, "stream_options": {"include_usage": True}}
        text = http.post(f"{url}/chat/completions", json={**body, **counted}).text
        *chunks, last = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
        assert all(c["usage"] is None and c["choices"][0]["logprobs"] is None for c in chunks)
        assert (last["usage"]["prompt_tokens"], last["usage"]["completion_tokens"], last["choices"]) == (7, 2, [])


def test_a_threshold_by_the_models_name():
    with routed(FakeEngine(*SURE), FakeEngine("LARGE")) as (url, _):
        asking = client(url)
        for model, tier in (("coca@0.2", "small"), ("coca@0.95", "large"), ("coca@1", "large")):
            answer = asking.chat.completions.create(model=model, messages=QUESTION)
            assert (answer.coca["tier"], answer.model) == (tier, model)
        assert [asking.models.retrieve(name).id for name in ("coca", "coca@0.5")] == ["coca", "coca@0.5"]
        for wrong in ("coca@", "coca@2", "coca@x", "coca@nan", "other@0.5"):
            with pytest.raises(openai.NotFoundError):
                asking.chat.completions.create(model=wrong, messages=QUESTION)
        with pytest.raises(openai.NotFoundError):
            asking.models.retrieve("gpt")


def post(url, stream):
    body = {"model": "coca", "messages": QUESTION, "stream": stream}
    return http.post(f"{url}/chat/completions", json=body)


def texts(answer):
    """The texts of a stream's events."""
    events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: {")]
    choices = [choice for value in map(json.loads, events) for choice in value.get("choices", ())]
    return [choice["delta"]["content"] for choice in choices if choice["delta"].get("content")]


def test_text_that_arrives_together_with_garbage_is_sent():
    with before(RawEngine(HEAD + chunk(PART + b"data: {\n\n") + chunk(b""), close=False)) as url:
        assert "".join(texts(post(url, True))) == "Forty-two."
        assert post(url, False).json()["error"]["code"] == "garbage"


def test_an_answer_is_whole_without_the_end_of_its_connection():
    engine = RawEngine(HEAD + chunk(WHOLE), close=False)
    with before(engine) as url:
        for _ in range(3):
            answer = post(url, True)
            assert "".join(texts(answer)) == "Forty-two."
            assert answer.text.rstrip().endswith("[DONE]")
        # On no connection does anything else follow, so none is used again, and none is kept.
        assert engine.requests == 3
        until(lambda: engine.open == 0)


def test_a_request_larger_than_a_megabyte_arrives_whole():
    small = FakeEngine(*SURE)
    question = [{"role": "user", "content": "é" * 1_500_000}]
    with routed(small) as (url, _):
        answer = http.post(f"{url}/chat/completions", json={"model": "coca", "messages": question})
    assert answer.status_code == 200
    assert small.requests[0]["messages"][-1]["content"] == question[0]["content"]


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    ("dialect", "limit", "prompt"),
    [("vllm", {"max_tokens": 1}, 7), ("vllm", {"stop": "-"}, 7), ("openai", {"stop": "-"}, None)],
)
def test_the_prompt_of_an_answer_that_a_limit_cuts_is_counted_or_unknown(dialect, limit, prompt, streamed):
    """An engine of the dialect ``vllm`` counts in every chunk; another one counts at the end, which is not awaited."""
    usages = [{"prompt_tokens": 7, "completion_tokens": n} if dialect == "vllm" else None for n in range(len(SURE))]
    sent = [data(delta(piece, usage=usage)) for piece, usage in zip(SURE, usages, strict=True)]
    engine = RawEngine(stream(*sent, 30 * TICK, event("", "length"), END), close=False)
    asked = {"stream": True, "stream_options": {"include_usage": True}} if streamed else {}
    with before(engine, backend={"dialect": dialect}) as url:
        answer = ask(url, **asked, **limit)
        last = list(answer)[-1] if streamed else answer
    assert (last.usage and last.usage.prompt_tokens) == prompt
    assert engine.bodies[0]["stream_options"].get("continuous_usage_stats", False) == (dialect == "vllm")
