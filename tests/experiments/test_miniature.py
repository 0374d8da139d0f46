"""The embedded families: right answers, disjoint splits, what is taught and what is not, the tiny model's alphabet."""

from collections import Counter

import pytest

from coca_mindspeed.local.tiny_model import tiny_config, tiny_tokenizer
from experiments.miniature import SYMBOLS, digit_records, miniature, progression_records


def test_digit_questions_have_the_answers_that_a_person_gives():
    for record in digit_records(400, "train", 0):
        if record.question[0] == ">":
            left = list(record.question[1:])
            for digit in record.answer:  # each digit is the largest that is left
                assert digit == max(left)
                left.remove(digit)
            assert not left
        else:
            counted, digits = record.question.split("#")
            assert record.answer == str(sum(character == counted for character in digits))


def test_progressions_step_by_step():
    by_question = {r.question: r.answer for r in progression_records(4000, "train", 0, 4)}
    seen = Counter()
    for question, answer in by_question.items():
        operator = "+" if "+" in question else "*"
        start, step = (int(part[::-1]) for part in question.split(operator))
        terms = [int(term[::-1]) for term in answer.split("=")]
        for before, after in zip([start, *terms], terms, strict=False):
            assert after == (before + step if operator == "+" else before * step) % 100
        assert all(len(term) == 2 for term in answer.split("="))
        seen[operator] += 1
    assert seen["+"] > 300
    assert seen["*"] > 300
    assert len(progression_records(1, "train", 0, 25)[0].answer) == 74


@pytest.mark.parametrize("name", ["short", "long"])
def test_the_tiny_model_can_read_and_write_all_of_it(name):
    data = miniature(name, size=500, evaluate=40)
    for records in (data.warm_up, data.train, data.evaluate):
        assert len({(r.dataset, r.id) for r in records}) == len({r.id for r in records}) == len(records)
    tokenizer, limit = tiny_tokenizer(SYMBOLS), tiny_config(SYMBOLS).max_position_embeddings
    for record in [*data.warm_up, *data.train, *data.evaluate]:
        ids = tokenizer(f"{record.question}={record.answer}", add_special_tokens=False)["input_ids"]
        assert tokenizer.pad_token_id not in ids  # what stands for an unknown character
        assert len(ids) + 7 < limit  # the confidence and the end
    assert {r.category for r in data.train} == {"math"}
    assert {r.category for r in data.evaluate} == ({"math", "code", "factual"} if name == "short" else {"math"})
    held_out = {r.question for r in data.evaluate if r.category != "factual"}
    assert not held_out & {r.question for r in [*data.train, *data.warm_up]}
