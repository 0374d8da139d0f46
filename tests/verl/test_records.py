"""Checks of the rows that verl has read: files for another method are refused."""

import copy
from dataclasses import replace

import pytest

from coca_mindspeed.algorithm.methods import training_method
from coca_mindspeed.data.export import verl_row
from coca_mindspeed.errors import ConfigError, DataError
from coca_mindspeed.local.tiny_model import tiny_tokenizer
from coca_mindspeed.verl.checks import check_prompts, check_rows
from coca_mindspeed.verl.settings import VerlSettings
from tests.tokenizers_for_tests import QWEN_TEMPLATE, qwen_like
from tests.verl.configurations import record

PROMPTS = {name: training_method(name).system_prompt for name in ("coca", "rlcr")}


def rows_of(*records, method="coca"):
    return [verl_row(each, PROMPTS[method], 0) for each in records]


def test_a_file_for_another_method_is_refused():
    records = [record(i) for i in range(5)]
    found = check_rows(rows_of(*records), "data.train_files", PROMPTS["coca"], tiny_tokenizer(), 400)
    assert found == records
    rows = rows_of(*records, method="rlcr")
    with pytest.raises(DataError, match=r"^data.val_files: row 1: record 'q0'"):
        check_rows(rows, "data.val_files", PROMPTS["coca"], tiny_tokenizer(), 400)
    check_rows(rows, "data.val_files", PROMPTS["rlcr"], tiny_tokenizer(), 400)


def test_a_prompt_that_verl_would_cut_is_refused():
    rows = rows_of(record(1), replace(record(2), question="2" * 60))
    tokens = len("2" * 60)
    check_rows(rows, "data.train_files", PROMPTS["coca"], _Characters(), tokens)
    with pytest.raises(DataError, match=r"row 2: record 'q2' .* data.max_prompt_length is 59"):
        check_rows(rows, "data.train_files", PROMPTS["coca"], _Characters(), tokens - 1)


@pytest.mark.parametrize(
    ("template", "settings", "key"),
    [
        (QWEN_TEMPLATE, {}, None),
        ("{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}", {}, "system message"),
        (QWEN_TEMPLATE + "<think>", {}, "coca.method.thinking"),
        (QWEN_TEMPLATE + "<think>", {"allow_open_thinking": False}, "coca.method.thinking"),
        (QWEN_TEMPLATE + "<think>", {"method": {"thinking": True}}, None),
        (QWEN_TEMPLATE + "<think></think>", {"method": {"thinking": True}}, "coca.method.thinking"),
        ("{{ strftime_now('%Y') }}" + QWEN_TEMPLATE, {}, "data.apply_chat_template_kwargs"),
    ],
)
def test_prompts_that_cannot_be_trained_on_are_refused(template, settings, key):
    tokenizer = copy.deepcopy(qwen_like())
    tokenizer.chat_template = template
    arguments = ([record(1)], PROMPTS["coca"], tokenizer, "DIR", VerlSettings(**settings))
    if key is None:
        check_prompts(*arguments)
        return
    with pytest.raises(ConfigError) as refusal:
        check_prompts(*arguments)
    assert key in str(refusal.value)


class _Characters:
    """Sees the question alone, a token a character."""

    def apply_chat_template(self, messages, **_options):
        return str(messages[-1]["content"].split(" ")[0])

    def __call__(self, texts, **_options):
        return {"input_ids": [[0] * len(text) for text in texts]}
