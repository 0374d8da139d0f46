"""The embedded data: right answers, disjoint splits, equal parts, one seed one result."""

from collections import Counter

import pytest

from coca_mindspeed.data.arithmetic import arithmetic_records
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


def test_the_seed_decides():
    assert arithmetic_records(300, "train", 5) == arithmetic_records(300, "train", 5)
    assert arithmetic_records(300, "train", 5) != arithmetic_records(300, "train", 6)


def test_asking_for_more_than_there_is():
    with pytest.raises(ValueError, match=r"distinct held-out questions 1\+2"):
        arithmetic_records(7 * 1_000, "evaluate", 0)
