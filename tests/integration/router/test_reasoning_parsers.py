"""The proxy and ``collect`` behind vLLM's own reasoning parsers (`make test-router`)."""

import copy
import json
import os
import subprocess
from pathlib import Path

import pytest
from tokenizers import AddedToken

from coca_mindspeed.algorithm.parsing import ResponseParser
from coca_mindspeed.utils.chat_client import Completion
from tests.router.servers_for_tests import ask, routed
from tests.router.test_thoughts import ANSWERED, FORMS, THINKS, THOUGHT, Thinker
from tests.tokenizers_for_tests import qwen_like

EXECUTABLE = os.environ.get("VLLM")
pytestmark = pytest.mark.skipif(EXECUTABLE is None, reason="vLLM has its own environment: make test-router")

PARSERS = ("qwen3", "deepseek_r1", "nemotron_v3", "glm45")
CASES = [(parser, form) for parser in PARSERS for form in FORMS]


@pytest.fixture(scope="module")
def fields(tmp_path_factory):
    """The fields that each parser returns for each form, by the interpreter of vLLM's environment."""
    tokenizer, directory = copy.deepcopy(qwen_like()), tmp_path_factory.mktemp("tokenizer")
    tags = ("<think>", "</think>", "<tool_call>", "</tool_call>")
    tokenizer.add_tokens([AddedToken(tag, normalized=False, special=False) for tag in tags])
    tokenizer.save_pretrained(directory)
    ids = {form: tokenizer(text, add_special_tokens=False)["input_ids"] for form, text in FORMS.items()}
    script = Path(__file__).with_name("vllm_parsers.py")
    asked = json.dumps([(parser, ids[form]) for parser, form in CASES])
    python = Path(EXECUTABLE).with_name("python")
    done = subprocess.run([python, script, directory], input=asked, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(zip(CASES, json.loads(done.stdout.splitlines()[-1]), strict=True))


@pytest.mark.parametrize(("parser", "form"), CASES)
def test_a_streamed_reply_is_read(fields, parser, form):
    engine = Thinker(FORMS[form])
    engine.deltas = fields[parser, form]["streamed"]
    with routed(engine, small_tier=THINKS, small_backend={"dialect": "vllm"}) as (url, _):
        answer = ask(url)
    message = answer.choices[0].message
    assert (answer.coca["confidence"], message.content) == (0.83, ANSWERED)
    assert message.reasoning.split() == THOUGHT.split()


@pytest.mark.parametrize(("parser", "form"), CASES)
def test_a_whole_reply_is_read(fields, parser, form):
    whole = fields[parser, form]["whole"]
    response = Completion(whole["content"] or "", None, "stop", whole["reasoning"] or "").response(thinking=True)
    parsed = ResponseParser(thinking=True)(response)
    assert parsed.answer.strip() == ANSWERED
    dropped = (parser, form) == ("deepseek_r1", "before")  # it drops the text before the opening tag
    assert parsed.confidence == (None if dropped else 0.83)
