"""Rows of a batch of verl's as groups: in any order, filled up, and with responses missing."""

import random

import pytest

from coca_mindspeed.errors import TrainingError
from coca_mindspeed.verl.advantage_step import check_broken, find_groups


def batch(groups: int = 3, size: int = 4) -> list[str]:
    return [f"u{group}_{session}_0" for group in range(groups) for session in range(size)]


def test_groups_are_found_in_whatever_order_the_batch_was_balanced_into():
    keys = batch()
    random.Random(0).shuffle(keys)
    found = find_groups(keys, [{}] * len(keys), 4, 3)
    assert found.broken == 0
    named = [keys[row] for row in found.rows]
    assert sorted(named) == sorted(batch())
    for start in range(0, 12, 4):
        uid = named[start].split("_")[0]
        assert named[start : start + 4] == [f"{uid}_{session}_0" for session in range(4)]


def test_rows_that_fill_a_batch_up_belong_to_no_group():
    keys = [*batch(2), "padabc_0_0", "padabc_1_0"]
    tags = [{}] * 8 + [{"is_padding": True}] * 2
    found = find_groups(keys, tags, 4, 2)
    assert (found.rows, found.broken) == (tuple(range(8)), 0)


def test_a_group_that_lacks_a_response_is_broken_and_never_half_used():
    keys = [key for key in batch() if key != "u1_2_0"]
    found = find_groups(keys, [{}] * 11, 4, 3)
    assert found.broken == 1
    assert {keys[row].split("_")[0] for row in found.rows} == {"u0", "u2"}
    assert find_groups(batch(2), [{}] * 8, 4, 3).broken == 1, "a question without any response is broken too"
    with pytest.raises(TrainingError, match=r"1 of 3 groups lack responses .* coca.broken_groups allows 0"):
        check_broken(found.broken, 0, 3, "groups")
    check_broken(found.broken, 1, 3, "groups")


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (["u0_0_0", "u0_0_1"], "one turn"),
        (["u0_0_0", "u0_0_0"], "was there already"),
        (["u0_0_0", "u0_1_0", "u0_2_0"], "3 responses, rollout.n is 2"),
        (["u0_0_0", "u0_1_0", "u1_0_0", "u1_1_0"], "2 questions in a step of data.train_batch_size 1"),
        (["u0"], "expected a key UID_SESSION_INDEX"),
        (["u0_a_0"], "expected a key UID_SESSION_INDEX"),
    ],
)
def test_what_cannot_be_is_an_error(keys, message):
    with pytest.raises(TrainingError, match=message):
        find_groups(keys, [{}] * len(keys), 2, 1)


def test_a_uid_may_hold_underscores():
    assert find_groups(["a_b_0_0", "a_b_1_0"], [{}, {}], 2, 1).rows == (0, 1)
