"""The embedded data: right answers, disjoint splits, equal parts, one seed one result."""

import hashlib
from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest

from coca_mindspeed.data.arithmetic import Generator, Question, arithmetic_records
from coca_mindspeed.data.prompts import prompt_messages


def solve(question):
    """Oracle: read units first, compute, write units first."""
    left, operator, right = int(question[:4][::-1]), question[4], int(question[5:][::-1])
    return str({"+": left + right, "*": left * right, "%": left % right if right else -1}[operator])[::-1]


@pytest.mark.parametrize("split", ["train", "evaluate"])
def test_answers_are_right_and_ids_unique(split):
    records = arithmetic_records(1400, split, seed=3)
    assert all(record.answer == solve(record.question) for record in records)
    assert len({record.id for record in records}) == 1400
    assert all(len(record.question) == 9 for record in records)
    assert prompt_messages(records[0], None) == [{"role": "user", "content": records[0].question}]
    assert set(Counter(r.metadata["kind"] for r in records).values()) == {200}


def test_splits_are_disjoint_in_either_order_of_the_operands():
    def key(question):
        left, operator, right = question[:4], question[4], question[5:]
        return (operator, *(sorted((left, right)) if operator in "+*" else (left, right)))

    train = {key(r.question) for r in arithmetic_records(20_000, "train", seed=0)}
    held_out = arithmetic_records(2_000, "evaluate", seed=1)
    assert not train & {key(r.question) for r in held_out}
    assert len({r.question for r in held_out}) == 2_000


def test_asking_for_more_than_there_is():
    with pytest.raises(ValueError, match=r"1\+2"):
        arithmetic_records(7 * 1_000, "evaluate", 0)


@dataclass(frozen=True)
class Digit:
    """Ten questions, all of them for training."""

    name: str = "digit"

    def draw(self, random: np.random.Generator) -> Question:
        text = str(random.integers(10))
        return Question(text, text, split_key=text)


@pytest.mark.parametrize(("max_repeats", "size", "found"), [(1, 11, 10), (3, 31, 30), (None, 500, 500)])
def test_a_training_set_repeats_no_question_more_often_than_allowed(max_repeats, size, found):
    generator = Generator("digits", "math", [Digit()], held_out=0.0, max_repeats=max_repeats)
    if found < size:
        with pytest.raises(ValueError, match=rf"digit, train: .*{found} of {size} .*max_repeats"):
            generator.records(size, "train", 0)
    records = generator.records(found, "train", 0)
    times = Counter(record.question for record in records)
    assert (len(times), times.total()) == (10, found)
    assert max(times.values()) <= (max_repeats or found)


@pytest.mark.slow
def test_the_demo_asks_the_questions_that_its_figures_were_measured_on():
    records = arithmetic_records(50_000, "train", 0)
    lines = "".join(f"{record.id} {record.question}={record.answer}\n" for record in records)
    assert (
        hashlib.sha256(lines.encode()).hexdigest() == "309ae3c24225ace3138c9bcbf92b9594217c13057b6115fe2b2fd7efc21e2c46"
    )
    times = Counter(record.question for record in records)
    assert (len(times), times.total(), max(times.values())) == (32_488, 50_000, 18)
