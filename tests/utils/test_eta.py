"""How long it will still take: by the last steps, with the evaluations to come, after a resume as before it."""

import pytest

from coca_mindspeed.utils.console import duration
from coca_mindspeed.utils.progress import STEPS, Pace


def row(step, evaluation=None, *, rollout=2.0):
    more = {} if evaluation is None else {"seconds/evaluation": evaluation}
    return {"step": step, "seconds/rollout": rollout, "seconds/grading": 0.5, "seconds/update": 1.5, **more}


def test_several_steps_told_as_one():
    assert Pace(10).left(0) is None
    assert Pace.of_training(10, 0, [{"step": 1, "tokens_per_second/rollout": 3.0}]).left(1) is None
    pace = Pace(100)
    pace.add(10, 5.0)
    pace.add(30, 35.0)
    assert pace.left(40) == 60.0
    assert pace.left(100) == 0.0


def test_evaluations_to_come_take_as_long_as_the_last_one():
    pace = Pace.of_training(25, 10, [row(step) for step in range(1, 10)])
    assert pace.left(9) == 4.0 * 16  # none was made yet
    pace.add_training_step(row(10, 30.0))
    assert pace.left(10) == 4.0 * 15 + 30.0
    for step in range(11, 20):
        pace.add_training_step(row(step))
    pace.add_training_step(row(20, 50.0))
    assert pace.left(19) == 4.0 * 6 + 50.0
    assert pace.left(20) == 4.0 * 5


def test_steps_of_long_ago_do_not_count_nor_what_a_row_does_not_say():
    slow = [row(step, rollout=100.0) for step in range(1, 20)]
    fast = [row(step) for step in range(20, 20 + STEPS)]
    assert Pace.of_training(100, 0, [*slow, *fast]).left(90) == 40.0
    assert Pace.of_training(100, 0, [row(1), {**row(2), "seconds/grading": None}]).left(90) == pytest.approx(37.5)


def test_a_resumed_run_knows_what_the_whole_one_knew():
    rows = [row(step, 30.0 if step % 10 == 0 else None, rollout=step) for step in range(1, 90)]
    whole = Pace.of_training(100, 10, rows[:70])
    resumed = Pace.of_training(100, 10, rows[20:70])
    assert whole.left(70) == resumed.left(70)
    for pace in (whole, resumed):
        pace.add_training_step(rows[70])
    assert whole.left(71) == resumed.left(71)


def test_durations_in_words():
    assert [duration(seconds) for seconds in (0.2, 59.4, 59.6, 3_569)] == ["0 s", "59 s", "1 min", "59 min"]
    assert [duration(seconds) for seconds in (3_571, 7_800, 86_369)] == ["1 h 0 min", "2 h 10 min", "23 h 59 min"]
    assert [duration(seconds) for seconds in (86_371, 273_600)] == ["1 d 0 h", "3 d 4 h"]
