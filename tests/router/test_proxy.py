"""The proxy between an unmodified openai client and engines that behave."""

import json
import math

import openai
import pytest

from coca_mindspeed.errors import ConfigError
from tests.router.servers_for_tests import (
    QUESTION,
    REFUSE,
    SURE,
    UNSURE,
    FakeEngine,
    ask,
    client,
    http,
    labelled,
    logged,
    routed,
)
from tests.support.waiting import until


def test_a_sure_answer_is_the_small_models_without_its_tag():
    small, large = FakeEngine(*SURE), FakeEngine("LARGE")
    with routed(small, large) as (url, _):
        answer = ask(url)
        assert answer.choices[0].message.content == "Forty-two."
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


# Confidences of the samples (None: invalid), the first one's answer is given; their mean.
MEANS = [
    ((0.2, 0.9, 0.5), 1.6 / 3),
    ((0.07, 0.07, 0.07), 0.07),
    ((0.2, None, 0.5, 0.8), 0.5),
    ((0.4, None, 0.4, None), 0.4),
    ((0.4, None, None), None),
    ((None, 0.4, 0.4), None),
]


@pytest.mark.parametrize(("stated", "mean"), MEANS)
def test_the_mean_of_several_samples_decides(stated, mean):
    """A threshold that the mean just reaches lets it pass; without a mean the request is refused."""

    class Sampled(FakeEngine):
        async def chat(self, request):
            self.requests.append(body := json.loads(await request.body()))
            s = stated[seed := body["seed"]]
            pieces = [f"7{seed}"] if s is None else ["<confidence>", str(s), "</confidence>", f"1{seed}", *"555"]
            return await FakeEngine(*pieces).chat(request)

    engine = Sampled()
    bands = [{"at_least": round(mean or 1.0, 12), "action": "answer"}, {"at_least": 0.0, "action": "refuse"}]
    tier = {"confidence": {"source": "mean", "samples": len(stated)}, "bands": bands, "invalid": "refuse"}
    with routed(engine, small_tier=tier, refusal="No.") as (url, _):
        answer = ask(url, seed=0)
    assert sorted(request["seed"] for request in engine.requests) == list(range(len(stated)))
    assert answer.coca["confidence"] == (None if mean is None else round(mean, 12))
    assert answer.choices[0].message.content == ("No." if mean is None else "10555")
    if mean is not None:
        spent = sum(1 if s is None else 3 for s in stated)
        assert answer.coca["tokens_to_confidence"] == spent
        assert answer.coca["tokens"]["small"] == spent + 4
        assert answer.usage.completion_tokens == 4


def test_the_samples_of_a_mean_share_the_tokens_of_the_caps():
    engine = FakeEngine(*SURE)
    with routed(engine, small_tier={"confidence": {"source": "mean", "samples": 3}}, caps={"tokens": 20}) as (url, _):
        ask(url)
    assert sorted(request["max_tokens"] for request in engine.requests) == [6, 6, 8]


BY_LOG_PROB = {"confidence": {"source": "answer_logprob"}}
PLAIN = {**BY_LOG_PROB, "states_confidence": False}
# Keys of a tier, pieces of its answer and their log-probs, options of the client; the answer's probability, the stated
# confidence and the text (None: the next tier answers).
LOG_PROBS = [
    (PLAIN, ("Forty", "-two"), (-0.1, -0.3), {}, math.exp(-0.2), None, "Forty-two"),
    (PLAIN, ("Forty", "-two"), (-0.1, -0.9), {}, math.exp(-0.5), None, None),
    (PLAIN, ("Forty", "-two"), (0.0, 1e-6), {}, 1.0, None, "Forty-two"),
    (PLAIN, ("Forty", "-two"), (-0.1, -9999.0), {}, 0.0, None, None),
    (PLAIN, ("Forty", "-two"), (-0.1, math.nan), {}, None, None, None),
    (PLAIN, (), (), {}, None, None, None),
    (PLAIN, ("Forty", "-two"), (-0.1, -0.9), {"stop": "y"}, math.exp(-0.1), None, "Fort"),
    (BY_LOG_PROB, SURE, (-5, -5, -5, -5, -5, -0.1, -0.2), {}, math.exp(-0.15), 0.9, "Forty-two."),
    (BY_LOG_PROB, UNSURE[:5], (-5, -5, -5, -0.1, -0.2), {}, math.exp(-0.15), 0.2, "no no "),
    (BY_LOG_PROB, ("For", "ty"), (-0.1, -0.3), {}, math.exp(-0.2), None, "Forty"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("tier", "pieces", "log_probs", "options", "probability", "stated", "text"), LOG_PROBS)
def test_the_log_prob_of_the_answer_decides(
    tier, pieces, log_probs, options, probability, stated, text, stream, tmp_path
):
    small, large = FakeEngine(*pieces, log_probs=log_probs), FakeEngine("LARGE")
    with routed(small, large, small_tier=tier, log={"directory": str(tmp_path)}) as (url, _):
        answer = ask(url, stream=stream, **options)
        pieces = list(answer) if stream else None
        given = (
            "".join(p.choices[0].delta.content or "" for p in pieces) if stream else answer.choices[0].message.content
        )
        fields = pieces[-1].coca if stream else answer.coca
        if text is not None:
            label = {"id": pieces[0].id if stream else answer.id, "correct": True}
            assert http.post(f"{url}/coca/labels", json=label).status_code == 200
    assert given == (text or "LARGE")
    assert small.requests[0]["logprobs"] is True
    assert (small.requests[0]["messages"] == QUESTION) == (tier is PLAIN)
    assert logged(tmp_path)[0]["steps"][0]["confidence"] == (probability and pytest.approx(probability))
    if text is None:
        assert (fields["tier"], fields["confidence"], fields["answer_probability"]) == ("large", None, None)
        return
    assert fields["answer_probability"] == fields["confidence"] == pytest.approx(probability)
    assert fields["stated_confidence"] == stated
    [prediction] = labelled(tmp_path)
    known = not options  # a cut answer says nothing about its confidence
    assert prediction.answer_probability == (pytest.approx(probability) if known else None)
    assert prediction.confidence == (stated if known else None)


INVALID = ("<confidence>", "85%", "</confidence>", " yes")
BROKEN = (*SURE, "early")  # a stream has begun by then
# Engine of the small model, keys of its tier and of the file; tiers of the answer (confidence, action and a word of the
# reason), and the header.
TIERS = [
    (SURE, {}, {}, [("small", 0.9, "answer", "0.7")], "0.9"),
    (UNSURE, {}, {}, [("small", 0.2, "escalate", "0.7"), ("large", None, "answer", "no confidence")], "none"),
    (INVALID, {}, {}, [("small", None, "escalate", "valid"), ("large", None, "answer", "no confidence")], "none"),
    (INVALID, {"invalid": "answer"}, {}, [("small", None, "answer", "valid")], "invalid"),
    (UNSURE, {"bands": REFUSE}, {}, [("small", 0.2, "refuse", "0.7")], "0.2"),
    (UNSURE, {}, {"caps": {"tokens": 3}},
     [("small", 0.2, "escalate", "0.7"), ("large", None, "refuse", "spent")], "none"),
    (("early",), {}, {}, [("small", None, "fail", "cut"), ("large", None, "answer", "no confidence")], "none"),
    (BROKEN, {}, {}, [("small", 0.9, "fail", "cut"), ("large", None, "answer", "no confidence")], "none"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("pieces", "tier", "sections", "tiers", "header", "stream"),
    [(*row, stream) for row in TIERS for stream in (False, True) if row[0] is not BROKEN or not stream],
)
def test_an_answer_names_each_tier_with_its_confidence_and_why_it_was_left(
    pieces, tier, sections, tiers, header, stream, tmp_path
):
    fault = "early" if pieces[-1] == "early" else None
    small = FakeEngine(*pieces[: -1 if fault else None], fault=fault)
    with routed(small, FakeEngine("LARGE"), small_tier=tier, log={"directory": str(tmp_path)}, **sections) as (url, _):
        body = {"model": "coca", "messages": QUESTION, "stream": stream}
        answer = http.post(f"{url}/chat/completions", json=body)
    events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: {")]
    shown = json.loads(events[-1] if stream else answer.text)["coca"]["tiers"]
    assert [(step["tier"], step["confidence"], step["action"]) for step in shown] == [step[:3] for step in tiers]
    assert all(word in step["reason"] for step, (*_, word) in zip(shown, tiers, strict=True))
    assert answer.headers["x-coca-confidence"] == header
    assert logged(tmp_path)[0]["steps"] == shown
    if stream:
        assert json.loads(events[0])["coca"]["tiers"] == shown


@pytest.mark.parametrize("stream", [False, True])
def test_an_unsure_answer_is_aborted_and_the_large_model_asked(stream):
    small, large = FakeEngine(*UNSURE, delay=0.005), FakeEngine("LARGE", " one")
    with routed(small, large) as (url, _):
        answer = ask(url, stream=stream)
        fields = list(answer)[-1].coca if stream else answer.coca
        assert (fields["tier"], fields["tokens"]) == ("large", {"small": 3, "large": 2})
        until(lambda: small.left == 1 and small.running == 0)
    assert large.requests[0]["messages"] == QUESTION


HALF_SURE = ("<confidence>", "0.5", "</confidence>", " 4", "2", ".")
# An engine's answer, keys of its tier and of the file; text, action and tier of the proxy's answer.
DECISIONS = [
    (INVALID, {"invalid": "escalate"}, {}, "LARGE", "answer", "large"),
    (INVALID, {"invalid": "answer"}, {}, "".join(INVALID), "answer", "small"),
    (INVALID, {"invalid": "refuse"}, {"refusal": "No."}, "No.", "refuse", "small"),
    (UNSURE, {"bands": REFUSE}, {"refusal": "I do not know."}, "I do not know.", "refuse", "small"),
    (HALF_SURE, {}, {"caps": {"escalations": 0}}, "42.", "answer", "small"),
    (HALF_SURE, {}, {"caps": {"escalations": 0, "exhausted": "refuse"}, "refusal": "No."}, "No.", "refuse", "small"),
    (UNSURE, {}, {"caps": {"tokens": 3}, "refusal": "No."}, "No.", "refuse", "large"),
]


@pytest.mark.parametrize(("pieces", "tier", "sections", "text", "action", "name"), DECISIONS)
def test_decisions(pieces, tier, sections, text, action, name):
    large = FakeEngine("LARGE")
    with routed(FakeEngine(*pieces), large, small_tier=tier, **sections) as (url, _):
        answer = ask(url)
        assert (answer.choices[0].message.content, answer.coca["action"], answer.coca["tier"]) == (text, action, name)
        assert "".join(p.choices[0].delta.content or "" for p in ask(url, stream=True)) == text
    assert bool(large.requests) == (text == "LARGE")


def test_the_clients_stop_ends_the_answer_and_not_the_confidence():
    small = FakeEngine(*SURE)
    with routed(small) as (url, _):
        answer = ask(url, stop=["-t", "0.9"])
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("Forty", "stop")
    assert "stop" not in small.requests[0]


# Chunks of an answer after its confidence; the answer that the client sees.
BLANKS = [
    ((">\n", "\n", "  Forty", "-two\n"), "  Forty-two\n"),
    ((">", " ", " Forty", " two "), "Forty two "),
    (("> \n ", "\n\tForty",), "\tForty"),
    ((">\n", "\n"), ""),
]  # fmt: skip


@pytest.mark.parametrize(("pieces", "text"), BLANKS)
def test_white_space_between_confidence_and_answer_is_dropped(pieces, text):
    with routed(FakeEngine("<confidence>0.9</confidence", *pieces)) as (url, _):
        assert ask(url, stop="\n\n").choices[0].message.content == text
        assert "".join(p.choices[0].delta.content or "" for p in ask(url, stream=True)) == text


def test_a_backend_gets_its_own_query_and_name_of_the_token_limit(caplog):
    class Strict(FakeEngine):
        async def chat(self, request):
            self.query = dict(request.query_params)
            return await super().chat(request)

    small = Strict(*SURE)
    with small.served() as engine:
        backend = {"url": f"{engine}/?api-version=1&key=a%2Bb", "token_limit": "max_completion_tokens"}
        with routed(small, small_backend=backend) as (url, _):
            for given in ("max_tokens", "max_completion_tokens"):
                ask(url, **{given: 50})
            small.fault = "json"
            with pytest.raises(openai.APIStatusError):
                ask(url)
    assert small.query == {"api-version": "1", "key": "a+b"}
    sent = [{name: body[name] for name in body if name.startswith("max_")} for body in small.requests]
    assert sent == [{"max_completion_tokens": 82}, {"max_completion_tokens": 82}, {}]
    assert not any("a+b" in r.getMessage() or "a%2Bb" in r.getMessage() for r in caplog.records)


@pytest.mark.parametrize(("limit", "tier"), [(20, "large"), (28, "small")])
def test_keys_of_a_tier(limit, tier):
    small = FakeEngine(*"<confidence>0.9</confidence>Forty-two.")  # 28 tokens of confidence
    keys = {"system_prompt": "Say how sure you are.", "temperature": 0.3, "max_confidence_tokens": limit}
    with routed(small, FakeEngine("LARGE"), small_tier=keys) as (url, _):
        assert ask(url, temperature=1.0, max_tokens=100).coca["tier"] == tier
    [body] = small.requests
    assert body["messages"][0] == {"role": "system", "content": "Say how sure you are."}
    assert (body["temperature"], body["max_tokens"]) == (0.3, 100 + limit)


def test_the_log_holds_no_text_and_labels_make_predictions_of_it(tmp_path):
    with routed(FakeEngine(*SURE), FakeEngine("L"), log={"directory": str(tmp_path)}) as (url, _):
        ids = [ask(url, extra_headers={"x-coca-domain": "sums"}).id for _ in range(2)]
        answer = http.post(f"{url}/coca/labels", json={"id": ids[0], "correct": False})
        assert answer.json() == {"id": ids[0], "correct": False}
        assert http.post(f"{url}/coca/labels", json={"id": ids[0], "correct": False}).status_code == 404
    text = json.dumps(logged(tmp_path))
    assert "6 times 7" not in text
    assert "Forty" not in text
    [prediction] = labelled(tmp_path)
    assert (prediction.id, prediction.confidence, prediction.correct) == (ids[0], 0.9, False)
    assert (prediction.dataset, prediction.model, prediction.tokens_to_confidence) == ("sums", "small", 5)
    # A proxy that starts again still knows the other answer.
    with routed(FakeEngine(*SURE), log={"directory": str(tmp_path), "texts": True}) as (url, _):
        assert http.post(f"{url}/coca/labels", json={"id": ids[1], "correct": True}).status_code == 200
        assert http.post(f"{url}/coca/labels", json={"id": ids[0], "correct": True}).status_code == 404
        ask(url)
    assert len(labelled(tmp_path)) == 2
    last = logged(tmp_path)[-1]
    assert (last["question"], last["response"]) == (QUESTION[0]["content"], "Forty-two.")


# Engine, sections, options of the client; why the answer was given, the stated confidence, that of the label.
GROUNDS = [
    (SURE, {}, {}, "confidence", 0.9, 0.9),
    (HALF_SURE, {"caps": {"escalations": 0}}, {}, "exhausted", 0.5, 0.5),
    (HALF_SURE, {}, {}, None, None, None),  # the next tier answers, and states none
    (SURE, {}, {"max_tokens": 1}, None, 0.9, None),  # a cut answer says nothing about its confidence
    (SURE, {}, {"stop": "-"}, None, 0.9, None),
]


@pytest.mark.parametrize(("chunks", "sections", "options", "basis", "stated", "of_label"), GROUNDS)
def test_a_label_counts_for_the_confidence_of_a_whole_answer_that_states_it(
    chunks, sections, options, basis, stated, of_label, tmp_path
):
    sections = {**sections, "log": {"directory": str(tmp_path)}, "small_backend": {"dialect": "vllm"}}
    with routed(FakeEngine(*chunks), FakeEngine("L"), **sections) as (url, _):
        assert http.post(f"{url}/coca/labels", json={"id": ask(url, **options).id, "correct": True}).is_success
    [prediction] = labelled(tmp_path)
    assert (prediction.confidence, prediction.correct) == (of_label, True)
    assert (prediction.tokens_to_confidence is None) == (of_label is None)
    [row] = logged(tmp_path)
    assert (row["basis"], row["stated_confidence"]) == (basis, stated)


def test_keys(tmp_path):
    environment = {"MINE": "s3cret", "THEIRS": "upstream-key"}
    sections = {"listen": {"api_key_env": "MINE"}, "log": {"directory": str(tmp_path), "texts": True}}
    small = FakeEngine(*SURE)
    with routed(small, environment=environment, small_backend={"api_key_env": "THEIRS"}, **sections) as (url, _):
        for wrong in ("none", "s3cre", "s3cret2"):
            with pytest.raises(openai.AuthenticationError):
                client(url, wrong).chat.completions.create(model="coca", messages=QUESTION)
            assert http.get(f"{url}/models", headers={"authorization": f"Bearer {wrong}"}).status_code == 401
        assert not small.requests
        assert [m.id for m in client(url, "s3cret").models.list()] == ["coca"]
        for shown in ("bearer s3cret", "BEARER  s3cret"):
            assert http.get(f"{url}/models", headers={"authorization": shown}).status_code == 200
        client(url, "s3cret").chat.completions.create(model="coca", messages=QUESTION)
        assert http.get(url.replace("/v1", "/health")).json()["status"] == "ok"
    assert small.authorizations == ["Bearer upstream-key"]
    assert "upstream-key" not in json.dumps(logged(tmp_path))
    with (
        pytest.raises(ConfigError, match=r"backends\.small\.api_key_env: .*ABSENT is not set"),
        routed(small, small_backend={"api_key_env": "ABSENT"}),
    ):
        pass
