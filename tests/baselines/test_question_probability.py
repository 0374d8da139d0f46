"""Question probability against a computation by hand, one token at a time."""

import pytest
import torch

from coca_mindspeed.baselines.predictors import question_probabilities, question_tokens
from coca_mindspeed.data.arithmetic import arithmetic_records
from coca_mindspeed.data.records import Record
from coca_mindspeed.errors import DataError
from tests.baselines.models_for_tests import random_policy, target_of, tiny_policy


@torch.no_grad()
def by_hand(policy, prompt, places):
    """The definition: run the text before each token by itself, and read that token's probability."""
    probabilities = [
        float(policy.model(torch.tensor([prompt[:i]])).logits[0, -1].softmax(-1)[prompt[i]]) for i in places
    ]
    return sum(probabilities) / len(probabilities)


def test_the_tiny_model_by_hand(tmp_path):
    policy = tiny_policy(tmp_path / "tiny")
    records = [
        *arithmetic_records(5, "train", 0),
        Record("f", "facts", "factual", "?271", "00", metadata={"instruction": ""}),
    ]
    found = question_probabilities(target_of(policy), records)
    for record, value in zip(records, found, strict=True):
        prompt = policy.tokenizer(f"{record.question}=")["input_ids"]
        # One token a character; the first has nothing before it and "=" is the template's.
        assert value == pytest.approx(by_hand(policy, prompt, list(range(1, len(record.question)))), rel=1e-4)


@pytest.mark.parametrize(
    ("architecture", "question"),
    [
        ("qwen2", "What is 12 + 34?"),
        ("llama", "Où est la gare ? 駅はどこ"),
        ("qwen2", " spaces around \n"),
        ("llama", "user"),
    ],
)
def test_chat_models_by_hand(tmp_path, architecture, question):
    policy = random_policy(tmp_path / "model", architecture)
    record = Record("r", "d", "math", question, "46")
    target = target_of(policy)
    prompt = policy.encode_prompts([record], target.method.training_method.system_prompt)[0]
    places = question_tokens(policy, record, target.method.training_method.system_prompt)
    assert places == list(range(places[0], places[-1] + 1))
    text = policy.tokenizer.decode([prompt[i] for i in places], clean_up_tokenization_spaces=False)
    assert question.strip() in text
    assert len(text) <= len(question.strip()) + 2  # tokens that straddle an end of the question, no more
    [value] = question_probabilities(target, [record])
    assert value == pytest.approx(by_hand(policy, prompt, places), rel=1e-3)


def test_system_prompt_and_instruction_are_context_but_not_counted(tmp_path):
    policy = random_policy(tmp_path / "model", "qwen2")
    plain = Record("r", "d", "factual", "Who wrote it?", "")
    told = Record("r", "d", "factual", "Who wrote it?", "", metadata={"instruction": "Be brief."})
    asked = Record("r", "d", "factual", "Who wrote it?", "", system="You are a poet.")
    tokens = [len(question_tokens(policy, record, "Answer.")) for record in (plain, told, asked)]
    assert len(set(tokens)) == 1
    values = question_probabilities(target_of(policy), [plain, told, asked])
    assert values[0] == pytest.approx(values[1], rel=1e-4)  # what follows the question cannot change it
    assert values[0] != pytest.approx(values[2], rel=1e-4)  # what precedes it does


@pytest.mark.parametrize(
    ("template", "question", "message"),
    [
        ("{% for m in messages %}{{ m.content[1:] }}{% endfor %}=", "12+3", "not found verbatim"),
        (None, "1", "no token with a predecessor"),  # its only token is the first one
    ],
)
def test_a_question_without_tokens_in_its_prompt_is_an_error(tmp_path, template, question, message):
    policy = tiny_policy(tmp_path / "tiny")
    policy.tokenizer.chat_template = template or policy.tokenizer.chat_template
    with pytest.raises(DataError, match=message):
        question_tokens(policy, Record("r", "d", "math", question, "15", metadata={"instruction": ""}), None)
