"""Difficulty, source and length, with values at the edges."""

import re

import pytest
from transformers import BatchEncoding

from coca_mindspeed.algorithm.parsing import CONFIDENCE_FIRST_PROMPT
from coca_mindspeed.data.prepare.filters import DifficultyFilter, LengthFilter, PromptCounter, SourceFilter
from coca_mindspeed.data.prompts import prompt_messages, prompt_tokens
from coca_mindspeed.data.records import Record
from coca_mindspeed.errors import DataError
from tests.data.tokenizers import save_tokenizer


def record(question="q", **metadata):
    return Record("i", "d", "math", question, "1", None, metadata)


@pytest.mark.parametrize(
    ("difficulty", "reason"),
    [(0.0, "below 0.25"), (0.25, None), (0.5, None), (0.75, None), (0.7500001, "above 0.75"), (1, "above 0.75")],
)
def test_difficulty_is_closed_at_both_ends(difficulty, reason):
    assert DifficultyFilter(0.25, 0.75, False)(record(difficulty=difficulty)) == reason


def test_unknown_difficulty_is_dropped_unless_asked_for():
    assert DifficultyFilter(0, 1, False)(record()) == "unknown"
    assert DifficultyFilter(0, 1, True)(record()) is None


def test_source():
    assert SourceFilter({"a"}, set())(record(source="a")) is None
    assert SourceFilter({"a"}, set())(record(source="b")) == "b"
    assert SourceFilter({"a"}, set())(record()) == "unknown"
    assert SourceFilter(set(), {"a"})(record(source="a")) == "a"
    assert SourceFilter(set(), {"a"})(record()) is None
    assert SourceFilter({"a"}, {"a"})(record(source="a")) == "a"


@pytest.mark.parametrize("family", ["qwen", "llama3"])
def test_length_counts_the_whole_prompt(tmp_path, family):
    directory = save_tokenizer(family, tmp_path)
    count = PromptCounter(directory, CONFIDENCE_FIRST_PROMPT)
    one = record("What is 1 + 2?")
    tokenizer = count._tokenizer
    rendered = tokenizer.apply_chat_template(
        prompt_messages(one, CONFIDENCE_FIRST_PROMPT), add_generation_prompt=True, tokenize=False
    )
    length = len(tokenizer.encode(rendered, add_special_tokens=False))
    assert count(one) == length
    assert LengthFilter(directory, 0, length, CONFIDENCE_FIRST_PROMPT)(one) is None
    assert LengthFilter(directory, length, None, CONFIDENCE_FIRST_PROMPT)(one) is None
    longer = LengthFilter(directory, 0, length - 1, CONFIDENCE_FIRST_PROMPT)
    assert longer(one) == f"prompt longer than {length - 1} tokens"
    shorter = LengthFilter(directory, length + 1, None, CONFIDENCE_FIRST_PROMPT)
    assert shorter(one) == f"prompt shorter than {length + 1} tokens"


class OfRelease:
    """A tokenizer whose ``apply_chat_template(tokenize=True)`` returns what a release of transformers does."""

    def __init__(self, tokenizer, major):
        self._tokenizer, self._major = tokenizer, major
        self.chat_template = tokenizer.chat_template

    def encode(self, text, add_special_tokens=True):
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def apply_chat_template(self, messages, add_generation_prompt=False, tokenize=True):
        text = self._tokenizer.apply_chat_template(
            messages, add_generation_prompt=add_generation_prompt, tokenize=False
        )
        if not tokenize:
            return text
        ids = self.encode(text, add_special_tokens=False)
        if self._major < 5:
            return ids
        return BatchEncoding({"input_ids": ids, "attention_mask": [1] * len(ids)})


@pytest.mark.parametrize("major", [4, 5])
@pytest.mark.parametrize("family", ["qwen", "llama3"])
def test_length_is_counted_alike_on_every_release_of_transformers(tmp_path, family, major):
    keep = LengthFilter(save_tokenizer(family, tmp_path), 0, 100, None)
    keep._count._tokenizer = OfRelease(keep._count._tokenizer, major)
    assert keep(record("word " * 5, instruction="")) is None
    assert keep(record("word " * 500)) == "prompt longer than 100 tokens"
    ids = prompt_tokens(keep._count._tokenizer, [{"role": "user", "content": "q"}])
    assert isinstance(ids, list)
    assert all(isinstance(token, int) for token in ids)


def test_without_a_chat_template_the_texts_are_counted(tmp_path):
    directory = save_tokenizer("qwen", tmp_path)
    count = PromptCounter(directory, "Be brief.")
    count._tokenizer.chat_template = None
    one = record("What is 1 + 2?", instruction="")
    encode = count._tokenizer.encode
    assert count(one) == len(encode("Be brief.")) + len(encode("What is 1 + 2?"))


def test_tokenizers_that_are_none(tmp_path):
    for directory in (tmp_path / "none", tmp_path):
        with pytest.raises(DataError, match=re.escape(f"{directory}: ")):
            LengthFilter(directory, 0, 1, None)
