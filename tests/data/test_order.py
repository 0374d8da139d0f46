"""Which questions a run asks in each step, on both engines: a function of seed and step."""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coca_mindspeed.data.records import Record
from coca_mindspeed.local import schedule
from coca_mindspeed.mindspeed.stages import dataset


def records(questions):
    return [Record(id=str(i), dataset="d", category="math", question=q, answer="1") for i, q in enumerate(questions)]


def local(asked, count, seed):
    return schedule.question_order(asked, count, seed)


def mindspeed_rl(asked, count, seed, no_shuffle=False):
    config = SimpleNamespace(seed=seed, no_shuffle=no_shuffle, global_batch_size=count)
    return dataset.question_order(asked, config)


def unshuffled(asked, count, seed):
    return mindspeed_rl(asked, count, seed, no_shuffle=True)


def permutation(engine, size, epoch, seed):
    if engine is unshuffled:
        return np.arange(size)
    seeds = schedule.derived_seed(seed, "order", epoch) if engine is local else (seed, epoch)
    return np.random.default_rng(seeds).permutation(size)


@pytest.mark.parametrize(
    ("engine", "steps"),
    [
        (local, [[4, 1, 3, 0], [2, 2, 3, 0], [4, 1, 3, 2], [4, 1, 0, 2]]),
        (mindspeed_rl, [[2, 0, 4, 1], [3, 3, 0, 2], [1, 4, 0, 2], [1, 3, 4, 3]]),
        (unshuffled, [[0, 1, 2, 3], [4, 0, 1, 2], [3, 4, 0, 1], [2, 3, 4, 0]]),
    ],
)
def test_the_order_is_that_of_earlier_releases(engine, steps):
    """Another order would ask a resumed run's questions twice, and others never."""
    order = engine(records("abcde"), 4, 7)
    assert [[int(record.id) for record in order.of_step(step)] for step in range(4)] == steps


@given(
    engine=st.sampled_from([local, mindspeed_rl, unshuffled]),
    different=st.lists(st.integers(0, 6), min_size=1, max_size=12),
    count=st.integers(1, 30),
    seed=st.integers(0, 2**31),
)
def test_each_step_is_what_a_log_of_the_run_says(engine, different, count, seed):
    """The oracle asks one question after the other, and keeps what it has asked."""
    asked_of, steps = records(map(str, different)), 5
    epochs = -(-steps * count // len(different))
    run = [int(i) for epoch in range(epochs) for i in permutation(engine, len(different), epoch, seed)]
    order, log = engine(asked_of, count, seed), []
    for step in range(steps):
        asked = [asked_of[index] for index in run[step * count : (step + 1) * count]]
        assert order.of_step(step) == asked
        assert order.seen(step) == [record.question in log for record in asked]
        log += [record.question for record in asked]
        assert order.times_asked(step) == pytest.approx(len(log) / len(set(log)))
