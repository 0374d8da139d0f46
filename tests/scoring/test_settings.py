"""Settings that the engines share."""

import pytest

from coca_mindspeed.scoring.settings import dump_is_due


@pytest.mark.parametrize(("interval", "steps"), [(4, [1, 4, 8]), (1, [*range(1, 10)]), (0, [])])
def test_dumps_come_at_their_interval(interval, steps):
    assert [step for step in range(1, 10) if dump_is_due(interval, step)] == steps
