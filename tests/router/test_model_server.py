"""Our own sampler behind the API: pieces, stops, token ids, cancellation, and both request styles through the proxy."""

import itertools
import json
import time
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import httpx
import openai
import pytest
import torch

from coca_mindspeed.algorithm.parsing import CLOSE_TAG, CONFIDENCE_FIRST_PROMPT, ResponseParser
from coca_mindspeed.config.schema import ModelConfig
from coca_mindspeed.local.load import load_policy
from coca_mindspeed.local.sampler import sample_responses, token_stream
from coca_router.backends import Backend
from coca_router.config import ServingConfig
from coca_router.model_server import ModelServer
from coca_router.proxy import Proxy
from tests.local.models_for_tests import write_random_model
from tests.router.background import served_in_background
from tests.router.servers_for_tests import QUESTION, raw_post, until
from tests.router.test_pinned import calibrated

pytestmark = pytest.mark.timing


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    path = write_random_model(tmp_path_factory.mktemp("model"), "qwen2")
    return load_policy(path, ModelConfig(), torch.device("cpu"))


@pytest.fixture
def babbler(policy):
    """A policy that never ends a response by itself."""
    return replace(policy, eos_ids=(policy.pad_id,))


def prompt_ids(policy, messages=QUESTION):
    text = policy.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return policy.tokenizer(text, add_special_tokens=False)["input_ids"]


def test_the_token_stream_equals_the_sampler(policy):
    prompt = prompt_ids(policy)
    for temperature in (1.0, 0.7):
        draws = {"temperature": temperature}
        whole = sample_responses(policy, [prompt], group_size=1, max_new_tokens=20,
                                 generator=torch.Generator().manual_seed(3), **draws)  # fmt: skip
        stream = token_stream(policy, prompt, generator=torch.Generator().manual_seed(3), **draws)
        tokens = [token for token, _ in zip(stream, range(20), strict=False)]
        length = int(whole.lengths[0])
        assert [token.id for token in tokens] == whole.token_ids[0, :length].tolist()
        assert [token.log_prob for token in tokens] == pytest.approx(whole.log_probs[0, :length].tolist(), abs=1e-5)
    greedy = token_stream(policy, prompt, temperature=0, generator=torch.Generator())
    logits = policy.sampling_logits(policy.model(torch.tensor([prompt])).logits[0, -1:], 1.0)
    assert next(greedy).id == int(logits.argmax())


@pytest.mark.parametrize("stream", [False, True])
def test_whole_and_streamed_answers_are_equal_to_the_samplers(policy, stream):
    with served_in_background(ModelServer(policy, "tiny").app()) as url:
        client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
        answer = client.chat.completions.create(
            model="tiny", messages=QUESTION, seed=5, max_tokens=12, stream=stream, logprobs=True,
            extra_body={"return_token_ids": True},
        )  # fmt: skip
        if stream:
            pieces = list(answer)
            assert pieces[0].prompt_token_ids == prompt_ids(policy)
            text = "".join(p.choices[0].delta.content or "" for p in pieces)
            ids = [i for p in pieces for i in getattr(p.choices[0], "token_ids", None) or ()]
            entries = [e for p in pieces if p.choices[0].logprobs for e in p.choices[0].logprobs.content]
            reason = pieces[-1].choices[0].finish_reason
        else:
            [choice] = answer.choices
            text, ids, entries = choice.message.content, choice.token_ids, choice.logprobs.content
            reason = choice.finish_reason
            assert answer.usage.completion_tokens == len(ids)
    drawn = sample_responses(policy, [prompt_ids(policy)], group_size=1, max_new_tokens=12, temperature=1.0,
                             generator=torch.Generator().manual_seed(5))  # fmt: skip
    assert ids == drawn.token_ids[0, : int(drawn.lengths[0])].tolist()
    assert text == policy.text.decode(drawn.token_ids, drawn.lengths)[0]
    assert reason == ("stop" if bool(drawn.finished[0]) else "length")
    assert len(entries) == len(ids)
    assert bytes(byte for entry in entries for byte in entry.bytes).decode("utf-8", "replace").startswith(text[:5])


def test_resuming_by_token_ids_equals_one_request(babbler):
    with served_in_background(ModelServer(babbler, "tiny").app()) as url, httpx.Client(timeout=30) as http:
        ids = prompt_ids(babbler)
        body = {"model": "tiny", "temperature": 0, "return_token_ids": True}
        whole = http.post(f"{url}/completions", json={**body, "prompt": ids, "max_tokens": 12}).json()["choices"][0]
        first = http.post(f"{url}/completions", json={**body, "prompt": ids, "max_tokens": 5}).json()["choices"][0]
        rest = {**body, "prompt": [*ids, *first["token_ids"]], "max_tokens": 7}
        second = http.post(f"{url}/completions", json=rest).json()["choices"][0]
        assert first["token_ids"] + second["token_ids"] == whole["token_ids"]
        for bad in ({"prompt": "text"}, {"prompt": [10**6]}, {"prompt": []}, {"prompt": [1] * 600}, {"top_p": 0.5}):
            assert http.post(f"{url}/completions", json={**body, "prompt": ids, **bad}).status_code == 400


def test_a_stop_ends_the_text_and_the_generation(babbler):
    with served_in_background(ModelServer(babbler, "tiny").app()) as url, httpx.Client(timeout=30) as http:
        body = {"model": "tiny", "messages": QUESTION, "seed": 1, "max_tokens": 40, "return_token_ids": True}
        plain = http.post(f"{url}/chat/completions", json=body).json()["choices"][0]
        stop = plain["message"]["content"][5:7]
        for include in (False, True):
            more = {"stop": stop, "include_stop_str_in_output": include}
            cut = http.post(f"{url}/chat/completions", json={**body, **more}).json()["choices"][0]
            place = plain["message"]["content"].index(stop)
            assert cut["message"]["content"] == plain["message"]["content"][: place + include * len(stop)]
            assert cut["finish_reason"] == "stop"
            assert len(cut["token_ids"]) < len(plain["token_ids"])


def test_a_client_that_leaves_frees_its_place_and_the_others_wait_their_turn(babbler):
    server = ModelServer(babbler, "tiny", concurrent=1, waiting=1, max_tokens=400)
    with ExitStack() as stack:
        # Slow enough that the first is not done before the others have come, however busy the machine is.
        stack.callback(babbler.model.model.register_forward_pre_hook(lambda *_: time.sleep(0.03)).remove)
        url = stack.enter_context(served_in_background(server.app()))
        http = stack.enter_context(httpx.Client(timeout=30))

        def started():
            return raw_post(url, json.dumps({"model": "tiny", "messages": QUESTION, "stream": True}).encode())

        first = started()
        until(lambda: server.generated > 3)
        second = started()
        until(lambda: server.accepted == 2)
        refused = http.post(f"{url}/chat/completions", json={"model": "tiny", "messages": QUESTION})
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        assert server.running == 1
        for connection in (first, second):
            connection.close()
        until(lambda: server.running == 0)
        stopped_at = server.generated
        time.sleep(0.2)
        assert server.generated == stopped_at < 400
        assert server.accepted == 0


@contextmanager
def proxied(server, tier, **sections):
    """A client of a proxy before our server."""
    with served_in_background(server.app()) as engine:
        bands = [{"at_least": 0.0, "action": "answer"}]
        values = {
            "backends": {"a": {"url": engine, "model": "tiny", "dialect": "vllm"}},
            "tiers": [{"name": "t", "backend": "a", "bands": bands, "max_confidence_tokens": 64, **tier}],
            **sections,
        }
        with served_in_background(Proxy(ServingConfig.model_validate(values), {}).app()) as url:
            yield openai.OpenAI(base_url=url, api_key="none", max_retries=0)


def script(policy, monkeypatch, *texts):
    """Make the policy's model say the texts in turn, token by token, whatever it is asked; return their ids.

    A prompt that ends with the beginning of a text is continued by that text.
    """
    scripts = [[*policy.tokenizer(text, add_special_tokens=False)["input_ids"], policy.eos_ids[0]] for text in texts]
    start = len(prompt_ids(policy, [{"role": "system", "content": CONFIDENCE_FIRST_PROMPT}, *QUESTION]))
    turns = itertools.cycle(scripts)

    class Scripting:
        def __init__(self, _, prompts):
            said = list(prompts[0][start:])
            self._rest = next(ids for ids in (scripts if said else turns) if ids[: len(said)] == said)[len(said) :]
            self.step(None)

        def step(self, token):
            if token is not None:
                self._rest = self._rest[1:] or self._rest
            self.logits = torch.full((1, policy.model.config.vocab_size), -20.0)
            self.logits[0, self._rest[0]] = 20.0

    monkeypatch.setattr("coca_mindspeed.local.sampler.Decoder", Scripting)
    return scripts


MEAN = {"confidence": {"source": "mean", "samples": 3}}


@pytest.mark.parametrize("tier", [{"style": "streaming"}, {"style": "stop_and_resume"}, MEAN], ids=str)
@pytest.mark.parametrize("stream", [False, True])
def test_every_style_gives_the_same_answer(policy, monkeypatch, tier, stream):
    # The newline after the tag is merged with its last bracket by this tokenizer.
    text = f"<confidence> 0.85 {CLOSE_TAG}\n\nStep 1: x > 3 émigré 🙂"
    [ids] = script(policy, monkeypatch, text)
    merged = [policy.text.bytes_of(i) for i in ids]
    assert any(b">\n" in token for token in merged)
    with proxied(ModelServer(policy, "tiny"), {**tier, "invalid": "refuse"}) as client:
        answer = client.chat.completions.create(model="coca", messages=QUESTION, stream=stream)
        if stream:
            pieces = list(answer)
            given = "".join(p.choices[0].delta.content or "" for p in pieces)
            fields, reason = pieces[-1].coca, pieces[-1].choices[0].finish_reason
        else:
            given, fields = answer.choices[0].message.content, answer.coca
            reason = answer.choices[0].finish_reason
    assert given == ResponseParser()(text).answer
    assert fields["confidence"] == pytest.approx(0.85, abs=1e-6)
    assert (fields["action"], reason) == ("answer", "stop")
    confidence_tokens = next(i for i, _ in enumerate(merged) if CLOSE_TAG.encode() in b"".join(merged[: i + 1])) + 1
    samples = tier.get("confidence", {}).get("samples", 1)
    assert fields["tokens_to_confidence"] == confidence_tokens * samples
    assert fields["tokens"]["t"] == len(ids) + confidence_tokens * (samples - 1)


RESUMING = {"style": "stop_and_resume"}


@pytest.fixture
def scripted(policy, monkeypatch):
    script(policy, monkeypatch, f"<confidence>0.9{CLOSE_TAG}12345678")
    return ModelServer(policy, "tiny")


@pytest.fixture
def bodies(monkeypatch):
    """The bodies that backends are sent, in order."""
    seen, make = [], Backend._body

    def remember(self, ask):
        seen.append(make(self, ask))
        return seen[-1]

    monkeypatch.setattr(Backend, "_body", remember)
    return seen


@pytest.mark.parametrize("style", ["streaming", "stop_and_resume"])
def test_max_tokens_are_the_answers(scripted, style):
    with proxied(scripted, {"style": style}) as client:
        answer = client.chat.completions.create(model="coca", messages=QUESTION, max_tokens=3)
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("123", "length")
    assert answer.usage.completion_tokens == 3


def test_a_resumed_answer_has_no_limit_of_its_own(scripted, bodies):
    """VLLM ends a completion after 16 tokens where no limit is named, at the end of its context where it is null."""
    with proxied(scripted, RESUMING) as client:
        answer = client.chat.completions.create(model="coca", messages=QUESTION)
    assert answer.choices[0].message.content == "12345678"
    assert (len(bodies), bodies[1]["max_tokens"]) == (2, None)


def test_a_resumed_answer_has_the_pinned_limit(scripted, bodies, tmp_path):
    calibrated(tmp_path / "m.json", model="tiny", sampling={"max_tokens": 5})
    with proxied(scripted, {**RESUMING, "calibration": str(tmp_path / "m.json")}) as client:
        answer = client.chat.completions.create(model="coca", messages=QUESTION)
    assert (answer.choices[0].message.content, bodies[1]["max_tokens"]) == ("12345", 5)


# Confidences of the samples (None: invalid), their mean, and the index of the sample that is resumed.
MEANS = [
    ((0.2, 0.9, 0.5), 1.6 / 3, 2),
    ((0.1, 0.3), 0.2, None),
    ((0.07, 0.07, 0.07), 0.07, None),
    ((0.2, None, 0.5, 0.8), 0.5, 2),
    ((None, 0.4, None, 0.4), 0.4, None),
    ((0.4, None, None), None, None),
]


@pytest.mark.parametrize(("stated", "mean", "resumed"), MEANS)
def test_the_mean_of_several_samples_decides_and_the_nearest_one_is_resumed(policy, monkeypatch, stated, mean, resumed):
    """A threshold that the mean just reaches lets it pass; without a mean the request is refused."""
    texts = [f"7{i}" if s is None else f"<confidence>{s}{CLOSE_TAG}1{i}" for i, s in enumerate(stated)]
    script(policy, monkeypatch, *texts)
    bands = [{"at_least": round(mean or 1.0, 12), "action": "answer"}, {"at_least": 0.0, "action": "refuse"}]
    tier = {"confidence": {"source": "mean", "samples": len(stated)}, "bands": bands, "invalid": "refuse"}
    with proxied(ModelServer(policy, "tiny", concurrent=len(stated)), tier, refusal="No.") as client:
        answer = client.chat.completions.create(model="coca", messages=QUESTION)
    assert answer.coca["confidence"] == (None if mean is None else round(mean, 12))
    text = answer.choices[0].message.content
    assert text.startswith("No." if mean is None else "1")
    assert resumed is None or text == f"1{resumed}"


def test_several_samples_differ_in_their_seeds_and_share_the_tokens_of_the_caps(scripted, bodies):
    seed = 2**63 - 1  # the largest that engines take
    with proxied(scripted, MEAN, caps={"tokens": 30}) as client:
        answer = client.chat.completions.create(model="coca", messages=QUESTION, seed=seed)
    seeds = {body["seed"] for body in bodies[:3]}
    assert (len(seeds), bodies[0]["seed"]) == (3, seed)
    assert all(-(2**63) <= each < 2**63 for each in seeds)
    assert [body["max_tokens"] for body in bodies[:3]] == [10, 10, 10]
    assert sum(answer.coca["tokens"].values()) <= 30


def test_fewer_tokens_than_samples_are_not_exceeded(scripted):
    with proxied(scripted, {**MEAN, "invalid": "refuse"}, caps={"tokens": 2}) as client:
        answer = client.chat.completions.create(model="coca", messages=QUESTION)
    assert (answer.coca["action"], answer.coca["tokens"]) == ("refuse", {"t": 2})
