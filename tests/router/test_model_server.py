"""Our own sampler behind the API: pieces, stops, token ids, cancellation, and an answer through the proxy."""

import json
import time
from contextlib import ExitStack
from dataclasses import replace

import openai
import pytest
import torch

from coca_mindspeed.algorithm.parsing import CLOSE_TAG, ResponseParser
from coca_mindspeed.config.schema import ModelConfig
from coca_mindspeed.local.load import load_policy
from coca_mindspeed.local.sampler import sample_responses, token_stream
from coca_router.config import ServingConfig
from coca_router.model_server import ModelServer
from coca_router.proxy import Proxy
from tests.local.models_for_tests import write_random_model
from tests.router.servers_for_tests import (
    ANSWER,
    QUESTION,
    ask,
    http,
    raw_post,
    served_in_background,
)
from tests.support.waiting import until

pytestmark = pytest.mark.timing


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    path = write_random_model(tmp_path_factory.mktemp("model"), "qwen2")
    return load_policy(path, ModelConfig(), torch.device("cpu"))


@pytest.fixture
def babbler(policy):
    """A policy that never ends a response by itself."""
    return replace(policy, eos_ids=(policy.pad_id,))


def prompt_ids(policy):
    text = policy.tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, tokenize=False)
    return policy.tokenizer(text, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize(("stream", "temperature"), [(False, 1.0), (True, 0.7)])
def test_whole_and_streamed_answers_are_equal_to_the_samplers(policy, stream, temperature):
    with served_in_background(ModelServer(policy, "tiny").app()) as url:
        client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
        more = {"seed": 5, "max_tokens": 12, "stream": stream, "temperature": temperature}
        more["extra_body"] = {"return_token_ids": True}
        answer = client.chat.completions.create(model="tiny", messages=QUESTION, **more)
        if stream:
            pieces = list(answer)
            text = "".join(p.choices[0].delta.content or "" for p in pieces)
            ids = [i for p in pieces for i in getattr(p.choices[0], "token_ids", None) or ()]
            reason = pieces[-1].choices[0].finish_reason
        else:
            [choice] = answer.choices
            text, ids, reason = choice.message.content, choice.token_ids, choice.finish_reason
            assert answer.usage.completion_tokens == len(ids)
    drawn = sample_responses(policy, [prompt_ids(policy)], group_size=1, max_new_tokens=12, temperature=temperature,
                             generator=torch.Generator().manual_seed(5))  # fmt: skip
    assert ids == drawn.token_ids[0, : int(drawn.lengths[0])].tolist()
    assert text == policy.text.decode(drawn.token_ids, drawn.lengths)[0]
    assert reason == ("stop" if bool(drawn.finished[0]) else "length")


def test_temperature_zero_takes_the_likeliest_token(policy):
    greedy = token_stream(policy, prompt_ids(policy), temperature=0, generator=torch.Generator())
    logits = policy.sampling_logits(policy.model(torch.tensor([prompt_ids(policy)])).logits[0, -1:], 1.0)
    assert next(greedy) == int(logits.argmax())


def test_a_stop_ends_the_text_and_the_generation(babbler):
    with served_in_background(ModelServer(babbler, "tiny").app()) as url:
        body = {"model": "tiny", "messages": QUESTION, "seed": 1, "max_tokens": 40, "return_token_ids": True}
        plain = http.post(f"{url}/chat/completions", json=body).json()["choices"][0]
        stop = plain["message"]["content"][5:7]
        cut = http.post(f"{url}/chat/completions", json={**body, "stop": stop}).json()["choices"][0]
        assert cut["message"]["content"] == plain["message"]["content"].partition(stop)[0]
        assert cut["finish_reason"] == "stop"
        assert len(cut["token_ids"]) < len(plain["token_ids"])
        for refused in ({"top_p": 0.5}, {"logprobs": True}, {"messages": QUESTION * 200}):
            assert http.post(f"{url}/chat/completions", json={**body, **refused}).status_code == 400


def test_a_client_that_leaves_frees_its_place(babbler):
    server = ModelServer(babbler, "tiny", concurrent=1, waiting=1, max_tokens=400)
    with ExitStack() as stack:
        # Slow enough that the first is not done before the others have come, however busy the machine is.
        stack.callback(babbler.model.model.register_forward_pre_hook(lambda *_: time.sleep(0.03)).remove)
        url = stack.enter_context(served_in_background(server.app()))

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
        until(lambda: server.accepted == 0)
        stopped_at = server.generated
        assert stopped_at < 400
        body = {"model": "tiny", "messages": QUESTION, "seed": 1, "max_tokens": 3}
        assert http.post(f"{url}/chat/completions", json=body).status_code == 200
        assert server.generated == stopped_at + 3  # nothing was generated beside this answer
        assert server.running == 0


@pytest.mark.parametrize("through_the_proxy", [False, True])
def test_a_template_that_refuses_the_messages_is_the_clients_error(policy, monkeypatch, through_the_proxy):
    template = "{{ raise_exception('roles must alternate') if messages | length > 1 }}{{ messages[0]['content'] }}"
    monkeypatch.setattr(policy.tokenizer, "chat_template", template)
    tier = {"name": "t", "backend": "a", "states_confidence": False}
    with ExitStack() as stack:
        url = stack.enter_context(served_in_background(ModelServer(policy, "coca", max_tokens=3).app()))
        if through_the_proxy:
            values = {"backends": {"a": {"url": url, "model": "coca"}}, "tiers": [tier]}
            url = stack.enter_context(served_in_background(Proxy(ServingConfig.model_validate(values), {}).app()))
        for messages, status in ((QUESTION, 200), (QUESTION * 2, 400)):
            answer = http.post(f"{url}/chat/completions", json={"model": "coca", "messages": messages})
            assert answer.status_code == status
        assert "roles must alternate" in answer.json()["error"]["message"]


def script(policy, monkeypatch, text):
    """Make the policy's model say the text, token by token, whatever it is asked; return its ids."""
    ids = [*policy.tokenizer(text, add_special_tokens=False)["input_ids"], policy.eos_ids[0]]

    class Scripting:
        def __init__(self, *_):
            self._rest = ids
            self.step(None)

        def step(self, token):
            if token is not None:
                self._rest = self._rest[1:] or self._rest
            self.logits = torch.full((1, policy.model.config.vocab_size), -20.0)
            self.logits[0, self._rest[0]] = 20.0

    monkeypatch.setattr("coca_mindspeed.local.sampler.Decoder", Scripting)
    return ids


@pytest.mark.parametrize(("stream", "limit"), [(False, None), (True, None), (False, 3)])
def test_an_answer_through_the_proxy(policy, monkeypatch, stream, limit):
    # The newline after the tag is merged with its last bracket by this tokenizer.
    text = f"<confidence> 0.85 {CLOSE_TAG}\n\nStep 1: x > 3 émigré 🙂"
    ids = script(policy, monkeypatch, text)
    merged = [policy.text.bytes_of(i) for i in ids]
    assert any(b">\n" in token for token in merged)
    tier = {"name": "t", "backend": "a", "bands": ANSWER, "max_confidence_tokens": 64, "invalid": "refuse"}
    with served_in_background(ModelServer(policy, "tiny").app()) as engine:
        values = {"backends": {"a": {"url": engine, "model": "tiny", "dialect": "vllm"}}, "tiers": [tier]}
        with served_in_background(Proxy(ServingConfig.model_validate(values), {}).app()) as url:
            answer = ask(url, stream=stream, max_tokens=limit)
            if stream:
                pieces = list(answer)
                given = "".join(p.choices[0].delta.content or "" for p in pieces)
                fields, reason = pieces[-1].coca, pieces[-1].choices[0].finish_reason
            else:
                given, fields = answer.choices[0].message.content, answer.coca
                reason = answer.choices[0].finish_reason
    assert (fields["confidence"], fields["action"]) == (0.85, "answer")
    confidence = next(i for i, _ in enumerate(merged) if CLOSE_TAG.encode() in b"".join(merged[: i + 1])) + 1
    assert fields["tokens_to_confidence"] == confidence
    whole = ResponseParser()(text).answer.lstrip()
    if limit is None:
        assert (given, reason, fields["tokens"]) == (whole, "stop", {"t": len(ids)})
    else:  # of the answer alone
        assert (whole.startswith(given), reason, answer.usage.completion_tokens) == (True, "length", limit)
