"""Which questions a run has asked before: a function of seed and step."""

import random

import pytest

from coca_mindspeed.data.records import Record
from coca_mindspeed.local.schedule import FirstSight, records_of_step


def records(questions):
    return [Record(id=str(i), dataset="d", category="math", question=q, answer="1") for i, q in enumerate(questions)]


@pytest.mark.parametrize("count", [1, 4, 7, 30])
@pytest.mark.parametrize("different", [3, 15, 20])
def test_first_sight_is_what_a_log_of_the_run_says(count, different):
    asked_of = records([f"question {random.Random(i).randrange(different)}" for i in range(20)])
    first_sight = FirstSight.of((asked_of, []), count, seed=5)
    log = []
    for step in range(10):
        asked = records_of_step(asked_of, step, count, seed=5)
        assert first_sight.seen(asked, step) == [record.question in log for record in asked]
        log += [record.question for record in asked]
        assert first_sight.times_asked(step) == pytest.approx(len(log) / len(set(log)))
