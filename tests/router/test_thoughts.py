"""Models that think behind the proxy: reasoning parsers of engines, both orders, streamed and whole."""

import json
import re

import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coca_mindspeed.algorithm.parsing import ResponseParser
from coca_mindspeed.errors import ConfigError
from coca_router.output_stream import ConfidenceReader, ThoughtSplitter
from tests.router.servers_for_tests import ANSWER, QUESTION, FakeEngine, ask, client, http, routed
from tests.router.test_output_stream import cut

STATED = "<confidence> 0.83 </confidence>"
THOUGHT = " ".join(f"step{i}" for i in range(60))
ANSWERED = "The answer is 42."
FORMS = {
    "before": f"{STATED}<think>\n{THOUGHT}\n</think>\n\n{ANSWERED}",
    "opened by the template": f"{STATED}\n{THOUGHT}\n</think>\n\n{ANSWERED}",
    "opened by the model": f"<think>\n{STATED}\n{THOUGHT}\n</think>\n\n{ANSWERED}",
}
#: Fields of vLLM's reasoning parsers: qwen3 before and since February 2026, deepseek_r1.
PARSERS = (None, "qwen3_old", "qwen3_new", "deepseek_r1")
THINKS = {"thinking": True}


def streamed(text, parser):
    """The field and text of each token, tags whole, as the parsers of vLLM stream them."""
    opened = closed = False
    for token in re.findall(r"</?think>|</?confidence>|\s*[^\s<]+|\s+|<", text):
        if (
            parser is not None
            and token in ("<think>", "</think>")
            and not (parser == "qwen3_old" and not opened and token == "</think>")
        ):
            opened, closed = opened or token == "<think>", closed or token == "</think>"
            continue
        inside = opened if parser == "qwen3_old" else parser is not None
        yield "reasoning" if inside and not closed else "content", token


class Thinker(FakeEngine):
    """An engine that sends tokens by their fields."""

    def __init__(self, text, parser=None, field="reasoning", **more):
        super().__init__(**more)
        self.deltas = [(field if name == "reasoning" else name, token) for name, token in streamed(text, parser)]

    async def events(self):
        for index, (field, token) in enumerate(self.deltas):
            self.generated += 1
            choice = {"delta": {field: token}, "finish_reason": None, "token_ids": [1]}
            choice["logprobs"] = {"content": [{"logprob": -1.0 if "step" in token else -0.5}]}
            yield b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"
            if self.most is not None and index + 1 >= self.most:
                break
        reason = "stop" if self.most is None else "length"
        yield b"data: " + json.dumps({"choices": [{"delta": {}, "finish_reason": reason}]}).encode() + b"\n\n"
        usage = {"prompt_tokens": 7, "completion_tokens": self.generated}
        yield b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\ndata: [DONE]\n\n"

    most = None


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("parser", PARSERS)
def test_each_parser_and_order_is_read(form, parser):
    engine = Thinker(FORMS[form], parser)
    with routed(engine, small_tier=THINKS, small_backend={"dialect": "vllm"}) as (url, _):
        whole = ask(url)
        chunks = [chunk for chunk in ask(url, stream=True) if chunk.choices]
    message = whole.choices[0].message
    assert (whole.coca["confidence"], message.content) == (0.83, ANSWERED)
    assert message.reasoning.split() == THOUGHT.split()
    tokens = len(re.findall(r"\s*\S+", ANSWERED))
    assert 0 <= whole.usage.completion_tokens - tokens <= 1
    assert whole.coca["thought_tokens"] >= 60
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == ANSWERED
    assert "".join(getattr(chunk.choices[0].delta, "reasoning", "") for chunk in chunks).split() == THOUGHT.split()
    assert "</think>" in engine.requests[0]["messages"][0]["content"]  # the prompt names the order


@pytest.mark.parametrize("field", ["reasoning", "reasoning_content"])
def test_a_model_trained_without_thinking_behind_a_reasoning_parser_is_read(field, caplog):
    with routed(Thinker(f"{STATED} {ANSWERED}", "deepseek_r1", field)) as (url, _):
        for _ in range(2):
            answer = ask(url)
            assert (answer.coca["confidence"], answer.choices[0].message.content) == (0.83, ANSWERED)
    assert sum("reasoning-parser" in record.message for record in caplog.records) == 1


def test_a_plain_models_thought_goes_to_the_client():
    with routed(Thinker(f"<think>{THOUGHT}</think>42", "deepseek_r1"), small_tier=PLAIN) as (url, _):
        message = ask(url).choices[0].message
    assert (message.content, message.reasoning) == ("42", THOUGHT)


PLAIN = {"states_confidence": False, "bands": None}


@pytest.mark.parametrize("parser", PARSERS)
def test_limits_of_the_client_are_the_answers(parser):
    engine = Thinker(f"{STATED}\none\n\ntwo</think>\n\nA B\n\nC", parser)
    tier = THINKS | {"max_thought_tokens": 100, "max_confidence_tokens": 20}
    with routed(engine, small_tier=tier, small_backend={"dialect": "vllm"}) as (url, _):
        stopped, short = ask(url, stop="\n\n").choices[0], ask(url, max_tokens=2).choices[0]
    assert (stopped.message.content, stopped.finish_reason) == ("A B", "stop")
    assert short.finish_reason == "length"
    assert short.message.content in ("A", "A B")
    assert engine.requests[1]["max_tokens"] == 2 + 100 + 20


def test_a_thought_that_is_cut_off_has_no_answer():
    engine = Thinker(FORMS["opened by the template"])
    engine.most = 30
    with routed(engine, small_tier=THINKS) as (url, _):
        answer = ask(url)
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("", "length")
    assert (answer.coca["confidence"], answer.usage.completion_tokens) == (0.83, 0)
    assert answer.choices[0].message.reasoning


@pytest.mark.parametrize("parser", PARSERS)
def test_the_log_probs_of_the_answer_alone_decide(parser):
    tier = THINKS | {"confidence": {"source": "answer_logprob"}, "bands": ANSWER}
    with routed(Thinker(FORMS["opened by the model"], parser), small_tier=tier) as (url, _):
        answer = ask(url)
    assert answer.coca["answer_probability"] == pytest.approx(0.6065, abs=1e-3)
    assert answer.choices[0].message.content == ANSWERED
    assert answer.choices[0].message.reasoning.split() == THOUGHT.split()


def test_an_unsure_thought_is_aborted():
    engine = Thinker(FORMS["opened by the model"].replace("0.83", "0.1"), delay=0.01)
    with routed(engine, FakeEngine("LARGE"), small_tier=THINKS) as (url, _):
        assert ask(url).choices[0].message.content == "LARGE"


def test_one_server_is_two_tiers_by_fixed_fields():
    engine = FakeEngine("<confidence>", "0.2", "</confidence>", "no")
    fixed = [{"chat_template_kwargs": {"enable_thinking": thinks}} for thinks in (False, True)]
    with engine.served() as server:
        backends = {
            name: {"url": server, "model": "m", "request": each} for name, each in zip("ab", fixed, strict=True)
        }
        tiers = [
            {"name": "fast", "backend": "a", "bands": [{"at_least": 0.0, "action": "escalate"}]},
            {"name": "thinker", "backend": "b", "bands": ANSWER, "thinking": True},
        ]
        with routed(None, backends=backends, tiers=tiers) as (url, _):
            assert ask(url).coca["tier"] == "thinker"
    assert [{"chat_template_kwargs": request["chat_template_kwargs"]} for request in engine.requests] == fixed


@pytest.mark.parametrize(
    ("request_fields", "status"), [({}, 400), ({"reasoning_effort": "low"}, 400), ({"reasoning_effort": "client"}, 200)]
)
def test_the_clients_effort_is_passed_on_where_the_backend_allows_it(request_fields, status):
    engine = Thinker(f"{STATED}{ANSWERED}")
    with routed(engine, small_backend={"request": request_fields}) as (url, _):
        body = {"model": "coca", "messages": QUESTION, "reasoning_effort": "high"}
        reply = http.post(f"{url}/chat/completions", json=body)
        assert reply.status_code == status
        ask(url)
    efforts = [request.get("reasoning_effort") for request in engine.requests]
    assert efforts == (["high", None] if status == 200 else [request_fields.get("reasoning_effort")])


def test_earlier_thoughts_are_dropped():
    engine = Thinker(f"{STATED}{ANSWERED}")
    earlier = [{"role": "assistant", "content": "a", "reasoning": "r", "reasoning_content": "r"}]
    with routed(engine) as (url, _):
        client(url).chat.completions.create(model="coca", messages=[*QUESTION, *earlier, *QUESTION])
    assert engine.requests[0]["messages"][-2] == {"role": "assistant", "content": "a"}


@pytest.mark.parametrize(
    ("tier", "backend"),
    [
        ({"thinking": True, "states_confidence": False, "bands": None}, {}),
        ({"thinking": True, "form": "run"}, {}),
        ({}, {"request": {"messages": []}}),
        ({}, {"request": {"temperature": 1}}),
        ({}, {"request": {"thinking_token_budget": "client"}}),
    ],
)
def test_keys_that_contradict_each_other_are_refused(tier, backend):
    with pytest.raises((ValueError, ConfigError)), routed(FakeEngine("x"), small_tier=tier, small_backend=backend):
        pass


_PARTS = ("<think>", "</think>", "<th", "ink>", "</", STATED, "<confidence>", "\n", "a", " ")


@settings(deadline=None)
@given(st.lists(st.sampled_from(_PARTS), max_size=10).map("".join), st.lists(st.integers(0, 200), max_size=8))
def test_any_cut_of_a_response_gives_the_parsers_answer(text, places):
    reader, splitter, answer = ConfidenceReader(thinking=True), ThoughtSplitter(), ""
    for piece in [*cut(text, places), None]:
        held = reader.finish() if piece is None else reader.feed(piece)
        answer += splitter.feed("", held)[1]
    parsed = ResponseParser(thinking=True)(text)
    assert (reader.confidence, answer) == (parsed.confidence, parsed.answer)


def test_unknown_effort_values_are_the_backends_to_refuse():
    with (
        routed(FakeEngine(fault="status", status=400), small_backend={"request": {"reasoning_effort": "client"}}) as (
            url,
            _,
        ),
        pytest.raises(openai.BadRequestError),
    ):
        ask(url, reasoning_effort="huge")
