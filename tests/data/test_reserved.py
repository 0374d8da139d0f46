"""Questions that are reserved for the confidence."""

import pytest

from coca_mindspeed.data.records import Record
from coca_mindspeed.data.reserved import is_reserved, parts
from coca_mindspeed.local.schedule import records_of_step, split_records_of_step


def record(number, question, **metadata):
    return Record(str(number), "data", "math", question, "1", metadata=metadata)


RECORDS = [record(i, f"Question {i}?") for i in range(2000)]


def test_the_share_is_that_of_the_questions():
    rest, reserved = parts(RECORDS, 0.25, seed=3)
    assert len(reserved) == pytest.approx(500, abs=60)  # three standard deviations
    assert sorted([*rest, *reserved], key=lambda r: int(r.id)) == RECORDS
    assert parts(RECORDS, 0.0, seed=3) == (RECORDS, [])
    assert [r.id for r in parts(RECORDS, 0.25, seed=4)[1]] != [r.id for r in reserved]


def test_duplicates_and_subjects_are_not_split():
    for i in range(50):
        spellings = [f"Is {i} prime?", f"is  {i} PRIME?", f"Is {i} prime？"]
        assert len({is_reserved(record(0, text), 0.5, 0) for text in spellings}) == 1
        asked = [record(0, text, subject=f"country:{i}") for text in ("Its capital?", "Its currency?")]
        assert len({is_reserved(each, 0.5, 0) for each in asked}) == 1


def test_a_step_draws_both_parts_in_proportion_and_every_question_once_an_epoch():
    split = parts(RECORDS[:120], 0.3, seed=0)
    asked = [split_records_of_step(split, step, 10, seed=0) for step in range(12)]
    assert sorted(r.id for records, _ in asked for r in records) == sorted(r.id for r in RECORDS[:120])
    share = len(split[1]) / 120
    for records, reserved in asked:
        assert len(records) == 10
        assert abs(sum(reserved) - 10 * share) <= 1
        assert [r in split[1] for r in records] == reserved


def test_no_share_is_the_order_of_before():
    assert split_records_of_step((RECORDS, []), 7, 10, 1) == (records_of_step(RECORDS, 7, 10, 1), [False] * 10)
