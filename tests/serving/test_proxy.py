"""The proxy between an unmodified openai client and engines that behave."""

import json
import time

import httpx
import openai
import pytest

from coca_mindspeed.errors import ConfigError
from coca_mindspeed.evaluation.predictions import read_predictions
from coca_mindspeed.files import read_json_lines
from coca_mindspeed.serving.background import served_in_background
from coca_mindspeed.serving.proxy import Proxy
from coca_mindspeed.serving.serving_config import ServingConfig
from tests.serving.servers_for_tests import ESCALATE, FakeEngine, routed, until

SURE = ("<conf", "idence>", "0.9", "</confidence", ">\nForty", "-two", ".")
UNSURE = ("<confidence>", "0.2", "</confidence>", *["no "] * 200)
QUESTION = [{"role": "user", "content": "What is 6 times 7?"}]


def client(url, key="none"):
    return openai.OpenAI(base_url=url, api_key=key, max_retries=0, timeout=20)


def ask(url, **more):
    return client(url).chat.completions.create(model="coca", messages=QUESTION, **more)


def test_a_sure_answer_is_the_small_models_without_its_tag():
    small, large = FakeEngine(*SURE), FakeEngine("LARGE")
    with routed(small, large) as (url, _):
        answer = ask(url)
        assert answer.choices[0].message.content == "\nForty-two."
        assert answer.choices[0].finish_reason == "stop"
        assert (answer.coca["confidence"], answer.coca["action"], answer.coca["tier"]) == (0.9, "answer", "small")
        assert answer.coca["tokens_to_confidence"] == 5
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (7, 2)
        raw = client(url).chat.completions.with_raw_response.create(model="coca", messages=QUESTION)
        assert raw.headers["x-coca-confidence"] == "0.9"
        assert raw.headers["x-coca-tier"] == "small"
    assert not large.requests
    system, user = small.requests[0]["messages"]
    assert "confidence level" in system["content"]
    assert user == QUESTION[0]


def test_the_same_in_a_stream():
    with routed(FakeEngine(*SURE), FakeEngine("LARGE")) as (url, _):
        pieces = list(ask(url, stream=True, stream_options={"include_usage": True}))
    assert "".join(p.choices[0].delta.content or "" for p in pieces if p.choices) == "\nForty-two."
    assert pieces[0].coca["confidence"] == 0.9
    assert pieces[-2].choices[0].finish_reason == "stop"
    assert pieces[-1].usage.completion_tokens == 2


@pytest.mark.parametrize("stream", [False, True])
def test_an_unsure_answer_is_aborted_and_the_large_model_asked(stream):
    small, large = FakeEngine(*UNSURE, delay=0.005), FakeEngine("LARGE", " one")
    with routed(small, large) as (url, _):
        answer = ask(url, stream=stream)
        if stream:
            answer = list(answer)
            text = "".join(p.choices[0].delta.content or "" for p in answer)
            fields = answer[-1].coca
        else:
            text, fields = answer.choices[0].message.content, answer.coca
        assert text == "LARGE one"
        assert (fields["tier"], fields["tokens"]["large"]) == ("large", 2)
        assert fields["tokens"]["small"] == 3
        until(lambda: small.left == 1 and small.running == 0)
    assert small.generated < 100
    assert large.requests[0]["messages"] == QUESTION


def test_an_invalid_confidence_is_its_own_case():
    for invalid, tier in (("escalate", "large"), ("answer", "small"), ("refuse", "small")):
        with routed(FakeEngine("<confidence>", "85%", "</confidence>", " yes"), FakeEngine("LARGE"),
                    small_tier={"invalid": invalid}) as (url, _):  # fmt: skip
            answer = ask(url)
            assert answer.coca["tier"] == tier
            expected = {"escalate": "LARGE", "answer": "<confidence>85%</confidence> yes"}
            assert answer.choices[0].message.content == expected.get(invalid, answer.choices[0].message.content)
            assert answer.coca["action"] == ("refuse" if invalid == "refuse" else "answer")


def test_refusing():
    bands = [{"at_least": 0.7, "action": "answer"}, {"at_least": 0, "action": "refuse"}]
    with routed(FakeEngine(*UNSURE), small_tier={"bands": bands}, refusal="I do not know.") as (url, _):
        answer = ask(url)
        assert (answer.choices[0].message.content, answer.coca["action"]) == ("I do not know.", "refuse")
        assert "".join(p.choices[0].delta.content or "" for p in ask(url, stream=True)) == "I do not know."


def test_sampling_and_voting():
    class Fickle(FakeEngine):
        answers = iter([" 1", " 42", " 7", " 42", " 42"])

        async def events(self):
            self.pieces = ["<confidence>0.5</confidence>", next(self.answers)]
            async for event in super().events():
                yield event

    bands = [{"at_least": 0.7, "action": "answer"}, {"at_least": 0, "action": "sample", "samples": 4}]
    with routed(Fickle(), small_tier={"bands": bands}) as (url, _):
        answer = ask(url)
    assert (answer.choices[0].message.content, answer.coca["action"]) == (" 42", "sample")
    assert answer.coca["reason"].endswith("3 of 4 agree")


VOTE = [{"at_least": 0.7, "action": "answer"}, {"at_least": 0, "action": "sample", "samples": 2}]
HALF_SURE = ("<confidence>", "0.5", "</confidence>", " 4", "2", ".")


@pytest.mark.parametrize("stream", [False, True])
def test_a_votes_answer_keeps_the_clients_limit(stream):
    small = FakeEngine(*HALF_SURE)
    with routed(small, small_tier={"bands": VOTE}, small_backend={"dialect": "vllm"}) as (url, _):
        answer = ask(url, max_tokens=2, stream=stream)
        if stream:
            answer = list(answer)
            text = "".join(piece.choices[0].delta.content or "" for piece in answer)
            assert (text, answer[-1].choices[0].finish_reason) == (" 42", "length")
        else:
            assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (" 42", "length")
            assert answer.usage.completion_tokens == 2
    assert [body["max_tokens"] for body in small.requests[1:]] == [34, 34]


@pytest.mark.parametrize("otherwise", ["escalate", "refuse"])
def test_a_votes_answer_meets_the_second_gate(otherwise, tmp_path):
    """What wins by votes may still be cut off: no client gets what the gate holds back."""
    small, large = FakeEngine(*HALF_SURE), FakeEngine("LARGE")
    tier = {"bands": VOTE, "after_answer": {"cut_off": False, "otherwise": otherwise}}
    sections = {"small_backend": {"dialect": "vllm"}, "log": {"directory": str(tmp_path)}, "refusal": "No."}
    with routed(small, large, small_tier=tier, **sections) as (url, _):
        cut, whole = ask(url, max_tokens=2), ask(url)
    assert cut.choices[0].message.content == ("LARGE" if otherwise == "escalate" else "No.")
    assert (whole.choices[0].message.content, whole.coca["action"]) == (" 42.", "sample")
    assert whole.coca["reason"].endswith("2 of 2 agree; the answer passed the second gate")
    steps = next(row["steps"] for _, row in read_json_lines(tmp_path / "requests.jsonl"))
    assert [step["action"] for step in steps][:2] == ["sample", otherwise]


def test_a_votes_gate_looks_at_the_answers_tokens_alone():
    class Logged(FakeEngine):
        def event(self, choice):
            text = choice["delta"].get("content")
            if text is not None:
                unlikely = -0.1 if text.startswith(" 42") else -100.0
                choice["logprobs"] = {"content": [{"token": text, "logprob": unlikely, "top_logprobs": []}]}
            return super().event(choice)

    tier = {"bands": VOTE, "after_answer": {"mean_log_prob": -1.0}}
    with routed(Logged("<confidence>", "0.5", "</confidence>", " 42"), FakeEngine("L"), small_tier=tier) as (url, _):
        assert ask(url).choices[0].message.content == " 42"


def test_the_hooks_context_goes_into_the_prompt_once():
    class Helped(FakeEngine):
        async def events(self):
            self.pieces = [*SURE] if "Douglas" in self.requests[-1]["messages"][-1]["content"] else [*UNSURE]
            async for event in super().events():
                yield event

    from starlette.applications import Starlette
    from starlette.responses import JSONResponse
    from starlette.routing import Route

    async def context(request):
        body = await request.json()
        assert body["confidence"] == 0.2
        return JSONResponse({"context": "Douglas Adams says 42."})

    bands = [{"at_least": 0.7, "action": "answer"}, {"at_least": 0, "action": "hook"}]
    small = Helped()
    with served_in_background(Starlette(routes=[Route("/hook", context, methods=["POST"])])) as hook:
        section = {"url": hook.replace("/v1", "/hook")}
        with routed(small, small_tier={"bands": bands}, hook=section) as (url, _):
            answer = ask(url)
    assert answer.choices[0].message.content == "\nForty-two."
    assert small.requests[1]["messages"][-1]["content"] == f"Douglas Adams says 42.\n\n{QUESTION[0]['content']}"


def test_the_clients_stop_ends_the_answer_and_not_the_confidence():
    small = FakeEngine(*SURE)
    with routed(small) as (url, _):
        answer = ask(url, stop=["-t", "0.9"])
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("\nForty", "stop")
    assert "stop" not in small.requests[0]


def test_a_second_gate_holds_the_answer_back():
    small, large = FakeEngine(*SURE), FakeEngine("LARGE")
    gate = {"mean_log_prob": -1.0}
    with routed(small, large, small_tier={"after_answer": gate}) as (url, _):
        answer = ask(url)
    assert answer.choices[0].message.content == "LARGE"
    assert small.requests[0]["logprobs"] is True


def test_the_tokens_of_a_request_are_capped():
    small, large = FakeEngine(*UNSURE), FakeEngine("LARGE")
    with routed(small, large, caps={"tokens": 3}) as (url, _):
        answer = ask(url)
    assert answer.coca["action"] == "refuse"
    assert not large.requests


def test_shadow_mode_gives_what_a_second_gate_would_have_held_back(tmp_path):
    sections = {"shadow": {"serve": "small"}, "log": {"directory": str(tmp_path)}}
    with routed(FakeEngine(*SURE), FakeEngine("L"), small_tier={"after_answer": {"mean_log_prob": -1.0}},
                **sections) as (url, _):  # fmt: skip
        assert ask(url).choices[0].message.content == "\nForty-two."
    [(_, row)] = read_json_lines(tmp_path / "requests.jsonl")
    assert (row["action"], row["shadow"]["action"]) == ("answer", "answer")
    assert row["shadow"]["after_answer"]["action"] == "escalate"


@pytest.mark.parametrize("serve", ["small", "large"])
def test_shadow_mode_decides_and_lets_one_tier_answer(serve, tmp_path):
    small, large = FakeEngine(*UNSURE[:6]), FakeEngine("LARGE")
    sections = {"shadow": {"serve": serve}, "log": {"directory": str(tmp_path)}}
    with routed(small, large, **sections) as (url, _):
        answer = ask(url)
    assert answer.choices[0].message.content == ("no no no " if serve == "small" else "LARGE")
    [(_, row)] = read_json_lines(tmp_path / "requests.jsonl")
    assert (row["shadow"]["action"], row["shadow"]["confidence"], row["tier"]) == ("escalate", 0.2, serve)


@pytest.mark.parametrize("fault", ["silent", "status"])
def test_shadow_mode_does_not_wait_for_a_probe_that_hangs(fault, tmp_path):
    sections = {"shadow": {"serve": "large"}, "log": {"directory": str(tmp_path)}}
    with routed(FakeEngine(*SURE, fault=fault), FakeEngine("LARGE"), **sections) as (url, _):
        started = time.monotonic()
        assert ask(url).choices[0].message.content == "LARGE"
        assert time.monotonic() - started < 5  # not the 30 s that a first token may take
    [(_, row)] = read_json_lines(tmp_path / "requests.jsonl")
    assert (row["shadow"]["action"], row["tier"]) == ("none", "large")


def test_the_log_holds_no_text_and_labels_make_predictions_of_it(tmp_path):
    with routed(FakeEngine(*SURE), FakeEngine("L"), log={"directory": str(tmp_path)}) as (url, _):
        ids = [ask(url, extra_headers={"x-coca-domain": "sums"}).id for _ in range(2)]
        answer = httpx.post(f"{url}/coca/labels", json={"id": ids[0], "correct": False})
        assert answer.json() == {"drift": []}
        assert httpx.post(f"{url}/coca/labels", json={"id": ids[0], "correct": False}).status_code == 404
        assert httpx.post(f"{url}/coca/labels", json={"id": ids[0]}).status_code == 400
        metrics = httpx.get(url.replace("/v1", "/metrics")).text
    for text in ((tmp_path / "requests.jsonl").read_text(), metrics):
        assert "6 times 7" not in text
        assert "Forty" not in text
    assert 'coca_requests_total{action="answer",outcome="ok",tier="small"} 2.0' in metrics
    assert 'coca_labels_total{correct="false"} 1.0' in metrics
    [prediction] = read_predictions(tmp_path / "labelled.jsonl")
    assert (prediction.id, prediction.confidence, prediction.correct) == (ids[0], 0.9, False)
    assert (prediction.dataset, prediction.model, prediction.tokens_to_confidence) == ("sums", "small", 5)
    # A proxy that starts again still waits for the other label; a torn last line is of nobody.
    with (tmp_path / "requests.jsonl").open("a") as file:
        file.write('{"id": "half')
    with routed(FakeEngine(*SURE), log={"directory": str(tmp_path), "texts": True}) as (url, _):
        assert httpx.post(f"{url}/coca/labels", json={"id": ids[1], "correct": True}).status_code == 200
        assert httpx.post(f"{url}/coca/labels", json={"id": ids[0], "correct": True}).status_code == 404
        ask(url)
    assert len(read_predictions(tmp_path / "labelled.jsonl")) == 2
    last = [row for _, row in read_json_lines(tmp_path / "requests.jsonl")][-1]
    assert (last["question"], last["response"]) == (QUESTION[0]["content"], "\nForty-two.")


GROUNDS = {
    # name: what the engine says, of the tier, sections; the basis, whether the confidence goes with the label
    "confidence": (SURE, {}, {}, True),
    "exhausted": (HALF_SURE, {}, {"caps": {"escalations": 0}}, True),
    "shadow": (HALF_SURE, {}, {"shadow": {"serve": "small"}}, True),
    "vote": (HALF_SURE, {"bands": VOTE}, {}, False),
    "gate": (SURE, {"after_answer": {"cut_off": False}}, {}, False),
    None: (HALF_SURE, {}, {}, False),  # the next tier answers, and states none
}


@pytest.mark.parametrize("basis", GROUNDS)
def test_a_label_speaks_of_a_confidence_where_its_answer_states_it(basis, tmp_path):
    """No drift here: an answer that was chosen among several may well be right more often than one of them said."""
    pieces, tier, sections, speaks = GROUNDS[basis]
    more = {"log": {"directory": str(tmp_path)}, "drift": {"error": 0.2, "run_length": 1.01}, **sections}
    with routed(FakeEngine(*pieces), FakeEngine("L"), small_tier=tier, **more) as (url, proxy):
        asked = ask(url)
        rung = httpx.post(f"{url}/coca/labels", json={"id": asked.id, "correct": True}).json()["drift"]
        assert rung == (["underconfident"] if speaks else [])
        moved = proxy._drift.watches["risk"].evidence
        assert (moved != 0) == (basis == "confidence"), "an error is certified for what was given by its confidence"
    [prediction] = read_predictions(tmp_path / "labelled.jsonl")
    stated = None if basis is None else 0.9 if pieces is SURE else 0.5
    assert (prediction.confidence, prediction.correct) == (stated if speaks else None, True)
    assert (prediction.tokens_to_confidence is not None) == speaks
    [(_, row)] = read_json_lines(tmp_path / "requests.jsonl")
    assert (row["basis"], row["stated_confidence"]) == (basis, stated)


def test_a_logged_request_of_an_earlier_release_is_labelled_without_a_confidence(tmp_path):
    with routed(FakeEngine(*SURE), log={"directory": str(tmp_path)}) as (url, _):
        id_ = ask(url).id
    log = tmp_path / "requests.jsonl"
    row = json.loads(log.read_text())
    del row["basis"]
    log.write_text(json.dumps(row) + "\n")
    with routed(FakeEngine(*SURE), log={"directory": str(tmp_path)}) as (url, _):
        assert httpx.post(f"{url}/coca/labels", json={"id": id_, "correct": True}).status_code == 200
    assert read_predictions(tmp_path / "labelled.jsonl")[0].confidence is None


def test_keys(tmp_path):
    environment = {"MINE": "s3cret", "THEIRS": "upstream-key"}
    sections = {"listen": {"api_key_env": "MINE"}, "log": {"directory": str(tmp_path), "texts": True}}
    small = FakeEngine(*SURE)
    with routed(small, environment=environment, small_backend={"api_key_env": "THEIRS"}, **sections) as (url, _):
        for wrong in ("none", "s3cre", "s3cret2"):
            with pytest.raises(openai.AuthenticationError):
                client(url, wrong).chat.completions.create(model="coca", messages=QUESTION)
            assert httpx.get(f"{url}/models", headers={"authorization": f"Bearer {wrong}"}).status_code == 401
        assert not small.requests
        assert [m.id for m in client(url, "s3cret").models.list()] == ["coca"]
        client(url, "s3cret").chat.completions.create(model="coca", messages=QUESTION)
        assert httpx.get(url.replace("/v1", "/health")).json()["status"] == "ok"
    assert small.authorizations == ["Bearer upstream-key"]
    assert "upstream-key" not in json.dumps([row for _, row in read_json_lines(tmp_path / "requests.jsonl")])
    values = {"backends": {"a": {"url": "http://h/v1", "model": "m", "api_key_env": "ABSENT"}},
              "tiers": [{"name": "t", "backend": "a", "bands": ESCALATE}]}  # fmt: skip
    with pytest.raises(ConfigError, match=r"backends\.a\.api_key_env: the environment variable ABSENT is not set"):
        Proxy(ServingConfig.model_validate(values), {})
